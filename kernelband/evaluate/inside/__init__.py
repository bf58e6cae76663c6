"""Code that runs inside the sandbox, beside candidate code; loaded by path, imports its siblings and no package."""
