"""The decoder step on a CPU as one call into C++: built once with the system's compiler, loaded through ctypes."""
