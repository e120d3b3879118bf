"""Operations as plain functions over tensors. Each file holds an op's contract and its reference; knows no model."""
