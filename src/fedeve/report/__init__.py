"""From folders of records to tables with statistics, exports and one self-contained page."""
