"""Four hosts labelled with their failure domains: two feeds of power, four racks."""

FILE = """
# host  label
h00 power=a rack=1
h01 power=a rack=2

h02 rack=3,power=b   # either order, either separator
h03 power=b rack=4
"""
