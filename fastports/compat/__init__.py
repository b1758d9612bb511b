"""The interfaces of other allocators, on top of this one: one module for each."""
