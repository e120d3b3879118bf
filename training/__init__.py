"""How the bundled checkpoint `ced-tiny` is made: text, tokenizer, training. Not part of the installed package."""
