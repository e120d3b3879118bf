"""The architecture on flat rows, one file per component. Owns weights; owns no state between steps."""
