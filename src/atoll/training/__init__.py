"""What trains experts, routers and students: one loop (`fit`), its checkpoints, and how it is computed."""


class StopRequested(Exception):
    """Training stopped on a signal after saving; the same command resumes."""
