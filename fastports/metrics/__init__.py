"""What ``stats()`` counts, for systems that collect numbers; each module needs an extra."""
