"""Partition: clustering, assignment and contact sheets.

Nothing is imported here: who paints contact sheets of samples needs no faiss.
"""
