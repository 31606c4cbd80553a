//! The rows: all refusals and failures of the command.

/// The needs of a row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    Nothing,
    /// A mount namespace of its own, for a small file system at `small`.
    Mount,
    /// `script`, for a terminal.
    Terminal,
    /// Another user, without other processes: limits on their number do not hold for root.
    User,
}
use Needs::{Mount, Nothing, Terminal, User};

/// A row: what it needs, the line, the exit code, fragments of the output in any order.
pub type Row = (Needs, &'static str, i32, &'static [&'static str]);

pub const TABLE: &[Row] = &[
    // Arguments.
    (Nothing, "$LACUNA run", 2, &["<IMAGE>"]),
    (
        Nothing,
        "$LACUNA test demand-paging --fill continue",
        2,
        &["add --memory-kind memfd"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory much",
        2,
        &["does not begin with a whole number"],
    ),
    (
        Nothing,
        "$LACUNA run hello --resident 64K",
        2,
        &["memory budget too small: 16 pages for 2 vCPUs"],
    ),
    (
        Nothing,
        "$LACUNA serve tape socket",
        2,
        &["is no page source"],
    ),
    (
        Nothing,
        "$LACUNA serve file:missing.img socket",
        2,
        &["missing.img"],
    ),
    (
        Nothing,
        "$LACUNA serve zeros no/such/folder",
        2,
        &[
            "cannot listen at no/such/folder",
            "name a socket in a folder",
        ],
    ),
    (
        Nothing,
        "touch socket; $LACUNA serve zeros socket",
        2,
        &[
            "cannot listen at socket",
            "it is not a socket: choose another name",
        ],
    ),
    (
        Nothing,
        "echo text > notes.txt; $LACUNA run loop.elf --memory 16M --control notes.txt; code=$?; \
         cat notes.txt; exit $code",
        2,
        &[
            "cannot listen at notes.txt",
            "it is not a socket: choose another name",
            "text",
        ],
    ),
    (
        Nothing,
        "echo text > notes.txt; $LACUNA snapshot save d --control notes.txt; code=$?; \
         cat notes.txt; exit $code",
        2,
        &[
            "cannot connect to this control socket",
            "name the one that was given to lacuna run --control",
            "text",
        ],
    ),
    // An empty TMPDIR names no folder.
    (
        Nothing,
        "TMPDIR= $LACUNA run hello --memory 16M --resident 8M",
        0,
        &["done"],
    ),
    (Nothing, "TMPDIR= $LACUNA doctor", 0, &[" /tmp: "]),
    (
        Nothing,
        "$LACUNA run hello --backend xen",
        2,
        &["[possible values: soft, kvm, auto]"],
    ),
    (
        Nothing,
        "$LACUNA run hello --backend kvm --seed 1",
        2,
        &["--seed needs the soft backend: leave it out, or give --backend soft or auto"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory-kind memfd --swap mem",
        2,
        &["--swap is for --memory-kind pool"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory-kind hugetlbfs --resident 8M",
        2,
        &[
            "--resident is for --memory-kind pool",
            "leave --resident out",
        ],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory-kind pool --pages-from handler:socket",
        2,
        &["fills anonymous or hugetlbfs memory, and not pool"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory-kind hugetlbfs --memory 33M",
        2,
        &["--memory: 34603008 bytes are not whole huge pages of 2M"],
    ),
    // No machine of these tests has reserved as many.
    (
        Nothing,
        "$LACUNA run hello --memory-kind hugetlbfs --memory 500G",
        2,
        &[
            "huge pages of 2 MiB: ",
            "reserve more of them (/proc/sys/vm/nr_hugepages)",
        ],
    ),
    (
        Nothing,
        "$LACUNA run hello --backend auto --seed 1 --memory 64M --resident 64M",
        0,
        &["trace", "done"],
    ),
    (Nothing, "$LACUNA walk", 2, &["unrecognized subcommand"]),
    (
        Nothing,
        "$LACUNA run hello --swap tape",
        2,
        &["is no swap device"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 18446744073709551615",
        2,
        &[
            "--memory 16777216T",
            "at most 511G",
            "give --memory 511G or less",
        ],
    ),
    (
        Nothing,
        "$LACUNA run text.elf --memory 18446744073709551615",
        2,
        &["guest memory of 18446744073709551615 bytes: give at least 1M and at most 64T"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 2T",
        2,
        &["--memory 2T: the built-in guests take at most 511G"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 1M",
        2,
        &["the guest needs at least 2M of memory"],
    ),
    (
        Nothing,
        "$LACUNA run hello --resident 1M --vcpus 64",
        2,
        &["for 64 vCPUs", "(24832 KiB)", "budget too small"],
    ),
    (
        Nothing,
        "$LACUNA run hello --vcpus 257",
        2,
        &["257 is not in 1..=256"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 128M --resident 128M --vcpus 256",
        0,
        &["hello from a guest: 256 vCPU"],
    ),
    // Architectures.
    (
        Nothing,
        "$LACUNA run hello --arch arm64 --memory 64M --resident 32M --vcpus 4 --backend auto",
        0,
        &["hello from a guest: 4 vCPU"],
    ),
    (
        Nothing,
        "$LACUNA run triple --arch arm64",
        2,
        &[
            "triple: neither a built-in guest nor a file to read",
            "workloads are bm, ",
        ],
    ),
    (
        Nothing,
        "$LACUNA run reset --arch arm64 --memory 64M --resident 32M",
        1,
        &["the guest asked for a reset of its machine"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 16M --append secnds=3",
        0,
        &[
            "hello does not read secnds: its parameters are ",
            "slice_us",
        ],
    ),
    // Images.
    (
        Nothing,
        "$LACUNA run nosuch",
        2,
        &["neither a built-in guest nor a file", "are bm, verify, "],
    ),
    (
        Nothing,
        "mkfifo fifo; $LACUNA run fifo",
        2,
        &["fifo: an image must be a regular file"],
    ),
    (
        Nothing,
        "$LACUNA run /dev/zero",
        2,
        &["/dev/zero: an image must be a regular file"],
    ),
    (
        Nothing,
        "$LACUNA run .",
        2,
        &["an image must be a regular file"],
    ),
    (
        Nothing,
        "truncate -s 1T sparse; $LACUNA run sparse",
        2,
        &["sparse: larger than 1G", "strip"],
    ),
    (
        Nothing,
        "echo text > text; $LACUNA run text",
        2,
        &["not an ELF file"],
    ),
    // The host.
    (
        Nothing,
        "$LACUNA run hello --swap file,dir=/proc",
        3,
        &["cannot create a swap file in /proc"],
    ),
    (
        Nothing,
        "ulimit -v 400000; $LACUNA run hello --memory 64M --resident 16M",
        3,
        &["address space for translation tables", "ulimit -v"],
    ),
    (
        Nothing,
        "ulimit -v 8000000; $LACUNA run text.elf --memory 16T --resident 64M --vcpus 1",
        3,
        &["no room for 34", "give the guest less memory", "ulimit -v"],
    ),
    (
        Nothing,
        "ulimit -f 2000; $LACUNA run verify --memory 64M --resident 16M --swap file,dir=.",
        3,
        &["swap device full", "File too large"],
    ),
    (
        Nothing,
        "ulimit -f 2000; $LACUNA run big.elf --memory 64M --resident 8M --swap file,dir=.",
        3,
        &["cannot load the image", "swap device full"],
    ),
    (
        Mount,
        "$LACUNA run big.elf --memory 64M --resident 8M --swap file,dir=small",
        3,
        &["cannot load the image", "No space left on device"],
    ),
    (
        Mount,
        "$LACUNA run verify --memory 64M --resident 16M --swap file,dir=small",
        3,
        &["swap device full", "No space left on device"],
    ),
    (
        User,
        "$LACUNA run verify --memory 64M --resident 32M --vcpus 64 --swap mem",
        3,
        &["cannot start its thread", "fewer vCPUs", "ulimit -u"],
    ),
    // Snapshots: nothing is left of a failed one, and the guest runs until it is stopped.
    (
        Mount,
        "{ $LACUNA run loop.elf --memory 16M --resident 16M --vcpus 1 --control c --quiet & }; \
         until [ -S c ]; do sleep 0.1; done; $LACUNA snapshot save small/saved --control c; \
         code=$?; echo left: $(ls small) end; kill $!; wait; exit $code",
        3,
        &[
            "memory: cannot write the file: No space left on device",
            "left: end",
            "interrupted by SIGTERM",
        ],
    ),
    (
        Nothing,
        "mkdir d; (ulimit -f 1000; exec $LACUNA run loop.elf --memory 16M --resident 16M --vcpus 1 \
         --swap mem --control c --quiet) & until [ -S c ]; do sleep 0.1; done; \
         $LACUNA snapshot save d/saved --control c; \
         code=$?; echo left: $(ls d) end; kill $!; wait; exit $code",
        3,
        &[
            "memory: cannot make the file: File too large",
            "left: end",
            "interrupted by SIGTERM",
        ],
    ),
    (
        Nothing,
        "$LACUNA snapshot restore none",
        2,
        &["none: cannot find a snapshot there, a folder with"],
    ),
    (
        Nothing,
        "$LACUNA snapshot save saved --control none",
        2,
        &[
            "none: cannot connect",
            "name the one that was given to lacuna run --control",
        ],
    ),
    // The guest.
    (
        Nothing,
        "$LACUNA run triple --memory 16M --resident 16M",
        1,
        &["outcome   vCPU 0: triple fault: vector "],
    ),
    // Output that cannot be written.
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M --quiet --json - > /dev/full",
        3,
        &[
            "cannot write the JSON to stdout: No space left on device",
            "run again, with --json and a file that can be written",
        ],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M > /dev/full",
        3,
        &["cannot write the text to stdout"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M --quiet --json - >&-",
        0,
        &[],
    ),
    (Nothing, "$LACUNA doctor --json >&-", 0, &[]),
    // Read-write, as Python's subprocess.DEVNULL is.
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M --quiet --json - 1<>/dev/null",
        0,
        &[],
    ),
    (Nothing, "$LACUNA doctor --json 1<>/dev/null", 0, &[]),
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M --quiet --json - > /dev/null",
        0,
        &[],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M --json /dev/full",
        3,
        &["cannot write the JSON to /dev/full", "outcome   done"],
    ),
    (
        Nothing,
        "ulimit -f 0; $LACUNA run hello --memory 16M --resident 16M --json out.json",
        3,
        &["cannot write the JSON to out.json: File too large"],
    ),
    (
        Nothing,
        "$LACUNA lab base --json nosuch/out.json",
        3,
        &["cannot write the JSON to nosuch/out.json: No such file"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M 2> /dev/full",
        0,
        &["outcome   done"],
    ),
    (Nothing, "$LACUNA run nosuch 2> /dev/full", 2, &[]),
    (
        Nothing,
        "{ $LACUNA run hello --memory 16M --resident 16M 2>&1; echo code $? >&3; } 3>&2 | true",
        0,
        &["code 0"],
    ),
    (
        Nothing,
        "$LACUNA --help > /dev/full",
        3,
        &["cannot write to stdout"],
    ),
    (
        Nothing,
        "$LACUNA doctor > /dev/full",
        3,
        &["cannot write the text to stdout"],
    ),
    (
        Nothing,
        "$LACUNA doctor --json > /dev/full",
        3,
        &["cannot write the JSON to stdout"],
    ),
    (
        Nothing,
        "{ $LACUNA doctor; echo code $? >&3; } 3>&2 | true",
        0,
        &["code 0"],
    ),
    // The guest's output.
    (
        Nothing,
        "$LACUNA run text.elf --memory 16M --resident 16M --vcpus 1 --quiet",
        0,
        &["\x1b]0;title\x07 end"],
    ),
    (
        Terminal,
        "$LACUNA run text.elf --memory 16M --resident 16M --vcpus 1 --quiet",
        0,
        &["\\u{1b}]0;title\\u{7} end"],
    ),
    (
        Terminal,
        "$LACUNA run text.elf --memory 16M --resident 16M --vcpus 1",
        0,
        &["\\u{1b}]0;title\\u{7} end"],
    ),
];
