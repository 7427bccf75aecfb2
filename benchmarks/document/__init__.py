"""The pages that are written from the files of results."""
