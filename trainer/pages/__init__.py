"""Pages about runs, from what they wrote: `report.html` of one or several, and the same served while they go on. Needs
no torch, and no matplotlib."""
