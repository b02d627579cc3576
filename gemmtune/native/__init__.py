"""The look-up of a warm call in C++. It is built in the background; without a compiler it is absent."""
