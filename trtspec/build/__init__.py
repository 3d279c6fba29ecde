"""Turn names into objects: assemble engines and build engine folders."""
