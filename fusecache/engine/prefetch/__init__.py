"""Prefetch by hints of jobs and by directory scans."""
