"""Where the n-gram tables of Engram are kept, and how rows come from there: placements, prefetch, row cache.

`store.py` is what the model asks; `placement.py` chooses between `file_table.py` (rows stay in the checkpoint's files)
and `ram_table.py` (one copy in memory for all processes of a host, made by `shared_memory.py`).
"""
