"""How one file names an artifact of the same run: by its place in the run, and by what must lie there."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from .errors import UserError
from .store import check_relative

DIGEST = r"^[0-9a-f]{64}$"


class Reference(BaseModel):
    """Something of this run: `path` is relative to the run, `digest` is what must lie there."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: str = Field(max_length=400)
    digest: str = Field(pattern=DIGEST)

    @field_validator("path")
    @classmethod
    def _stays_in_the_run(cls, path: str) -> str:
        try:
            check_relative(path)
        except UserError as error:
            raise ValueError(str(error)) from error
        return path

    @property
    def name(self) -> str:
        """What people call it: the name of its folder, such as 03-1f2e3d4c5b6a."""
        return self.path.rpartition("/")[2]
