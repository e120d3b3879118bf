"""Drives model and cache without SGLang: offline generation, the test driver, comparisons between engines."""
