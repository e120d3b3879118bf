"""The only rooms that import sglang: entry points, platform, flags, model class, attention backend and KV
pool.

`register.py` is where SGLang enters; `seams.py` lists every name of SGLang that this folder builds on.
"""
