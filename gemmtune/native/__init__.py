"""The look-up of a warm call in C++: built beside the first plans of a process, absent without a compiler."""
