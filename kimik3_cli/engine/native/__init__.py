"""The small operations of a decoding step in C, where the package was installed with a C compiler."""
