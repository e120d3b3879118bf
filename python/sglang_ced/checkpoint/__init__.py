"""The published checkpoint on disk: what it holds, reading it without a copy, writing the same layout.

names      what a checkpoint of a given config must hold, and what part of the model a name belongs to
files      which shard holds which tensor, from the headers alone (needs no torch)
reader     `Checkpoint`: every tensor, as a view of the mapped file
writer     a checkpoint of any shape from float tensors, or from a seed
token_map  the class of every token id, for the n-gram hash
tokenizer  a small byte-level tokenizer of our own
make_toy   the bundled miniature: `python -m sglang_ced.checkpoint.make_toy OUT`
"""
