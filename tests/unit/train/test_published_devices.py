"""The devices that a process publishes in place of all processes of its world."""

from dtft._jax_internals import topology_like

H200 = (
    b"\x08\x01\x12$86cc6744-3d64-4bee-9568-2f7f7a0ef276"
    b"\x1a4\x12\x0bNVIDIA H200\x1a\x12NVIDIA Corporation2\x039.08\x84\x01h\x80\x98\x0e"
    b"x\x80\x80\xfc\x99\xaf\x04"
)
"""What jaxlib 0.11.2 wrote as process 1 on a machine with one H200."""
BOOT, REST = H200[2:40], H200[42:]


def test_every_process_has_a_device_like_that_of_one() -> None:
    every = topology_like(H200, 3, "cuda")
    nodes = []
    while every:
        assert every[0] == 0x0A  # a node
        size = every[1]
        nodes.append(every[2 : 2 + size])
        every = every[2 + size :]
    boots = [BOOT.replace(b"\x12$", b"\x12&") + f"-{i}".encode() for i in range(3)]
    numbers = [b"", b"\x08\x01", b"\x08\x02"]
    places = [b"", b" \x01(\x01", b" \x02(\x02"]
    assert nodes == [
        number + boot + b"\x1a" + bytes([len(REST + place)]) + REST + place
        for number, boot, place in zip(numbers, boots, places, strict=True)
    ]


def test_devices_are_counted_over_all_processes() -> None:
    two = H200 + H200[40:]
    every = topology_like(two, 2, "cuda")
    for place in (b" \x01", b" \x02(\x01", b" \x03(\x01"):
        assert REST + place in every
