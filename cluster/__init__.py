"""Where and when: the only package that imports Ray. It performs what `kernelband.search` decides."""
