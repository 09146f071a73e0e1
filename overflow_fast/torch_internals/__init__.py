"""The private APIs of torch that the package uses, each behind a function."""
