//! The sections of a report: which results belong together, and what they show.

/// A section.
pub(crate) struct System {
    /// Short name, of its picture's file too.
    pub name: &'static str,
    pub title: &'static str,
    /// The problem, and what the mechanism does.
    pub mechanism: &'static str,
    /// The experiment, in two sentences.
    pub experiment: &'static str,
    /// The drawing.
    pub drawing: &'static str,
    /// Beginnings of the ids.
    prefixes: &'static [&'static str],
    /// The ids that stand for it at a glance; the first that was measured does.
    pub headlines: &'static [&'static str],
    /// How it is measured: a page of the repository.
    pub page: &'static str,
}

/// In the order of their years; then what the systems are part of.
pub(crate) const SYSTEMS: [System; 8] = [
    System {
        name: "apf",
        title: "x86 async page faults, 2010",
        mechanism: "A vCPU that touches a swapped-out page waits for the disk, and all processes \
                    of the guest wait with it. With async page faults the guest gets a token at \
                    once, runs another process, and resumes the first when the page is ready.",
        experiment: "Processes that compute run beside processes whose pages are swapped out. The \
                     mechanism is turned on and off in one running guest, and the rates of both \
                     groups are compared.",
        drawing: include_str!("../drawings/apf.svg"),
        prefixes: &["apf.", "letters.talk."],
        headlines: &["apf.worker_ratio.latency_1ms", "letters.talk.worker_ratio"],
        page: "speed-apf",
    },
    System {
        name: "thp",
        title: "Huge pages and range invalidation, 2012",
        mechanism: "To unmap a huge page, the host walked its 512 small pages one by one. With \
                    range invalidation one call unmaps the leaf of 2 MiB and flushes once.",
        experiment: "The notifier's call for 2 MiB is timed page by page and as a range, in turns, \
                     with and without a vCPU that holds the block. Other parts measure the first \
                     touch, random reads, and huge pages under memory pressure.",
        drawing: include_str!("../drawings/thp.svg"),
        prefixes: &["thp.", "letters.range."],
        headlines: &["thp.call.elsewhere"],
        page: "speed-thp",
    },
    System {
        name: "pml",
        title: "Page-modification logging, 2015",
        mechanism: "With write protection, the first write to each page is a fault and an exit. \
                    With a page-modification log the processor appends the address, and exits when \
                    its log of 512 entries is full.",
        experiment: "A guest writes while the host collects its dirty pages; the CPU time of a \
                     dirtied page, and the guest's score, are compared with write protection's. \
                     Simulated figures charge 619 ns for each exit that VMX would take.",
        drawing: include_str!("../drawings/pml.svg"),
        prefixes: &["pml.", "letters.pml."],
        headlines: &["pml.cost_ratio.raw", "pml.cost_ratio.refill"],
        page: "speed-pml",
    },
    System {
        name: "arm64",
        title: "arm64 async page faults, 2020",
        mechanism: "The same problem on AArch64, where the host injects an abort instead of #PF. \
                    The guest runs another process until the notification that the page is ready.",
        experiment: "A memory-bound process runs beside a CPU-bound one on the same vCPU. Their \
                     progress with async page faults is compared with their progress without.",
        drawing: include_str!("../drawings/arm64.svg"),
        prefixes: &["apf_arm64.", "arm64.apf.", "letters.arm64."],
        headlines: &[
            "apf_arm64.cpu_bound_ratio.rfcv2.1vcpu",
            "arm64.apf.worker_ratio.latency_1ms",
        ],
        page: "speed-arm64-apf",
    },
    System {
        name: "paging",
        title: "Exits on missing memory, 2023",
        mechanism: "A userfaultfd has one queue for all vCPUs: its lock and its wake-ups limit the \
                    pages a second. With exits on missing memory each vCPU returns to its own VMM \
                    thread, which fills the page and resumes it.",
        experiment: "vCPUs touch memory that was never provided, and the pages a second by exits \
                     are compared with the best queue's. Simulated figures charge an exit's cost \
                     on hardware to both.",
        drawing: include_str!("../drawings/paging.svg"),
        prefixes: &["paging.", "letters.paging."],
        headlines: &[
            "paging.exit_vs_best_queue.2vcpu.exitcost",
            "paging.exit_vs_best_queue.1vcpu.exitcost",
        ],
        page: "speed-paging",
    },
    System {
        name: "moves",
        title: "Migration, post-copy and restore",
        mechanism: "A guest moves or resumes while its memory is still elsewhere: pages are copied \
                    in rounds before it moves, or fetched on demand after it. Exits on missing \
                    memory and async page faults together keep its other processes running.",
        experiment: "A running guest moves to another VM, or resumes from a snapshot, with and \
                     without each mechanism. If QEMU is installed, it moves the same guest.",
        drawing: include_str!("../drawings/moves.svg"),
        prefixes: &["migrate.", "postcopy.", "restore."],
        headlines: &["postcopy.worker_ratio.1ms"],
        page: "speed-migration",
    },
    System {
        name: "pager",
        title: "The pager for other VMMs",
        mechanism: "The pager fills the memory of another VMM's guest by userfaultfd, from an \
                    image or a page source. It reads the rest of the image beside the guest's \
                    faults.",
        experiment: "VMs that share an image fault on their pages, and their latencies are \
                     compared with a simple handler's and with the kernel's own paging. The \
                     numbers in the ids are VMs at once.",
        drawing: include_str!("../drawings/pager.svg"),
        prefixes: &["pager."],
        headlines: &[],
        page: "pager",
    },
    System {
        name: "engine",
        title: "The engine under all of them",
        mechanism: "A guest's access goes through a TLB and stage-2 tables in user space. A fault \
                    takes a frame, maps it, and resumes the instruction.",
        experiment: "The CPU time of a first touch is compared with the host kernel's own fault. \
                     Instruction rates are compared with native code and QEMU's TCG.",
        drawing: include_str!("../drawings/engine.svg"),
        prefixes: &["fault.", "cpu.", "run."],
        headlines: &[],
        page: "speed-fault",
    },
];

impl System {
    /// The index of the section of the result `id`; nothing for an unknown experiment. Results of
    /// an experiment with arm64 guests belong to the experiment, unless a section names them.
    pub fn of(id: &str) -> Option<usize> {
        let plain = id.strip_prefix("arm64.").unwrap_or(id);
        [id, plain].into_iter().find_map(|id| {
            let is_prefix = |prefix: &&str| id.starts_with(*prefix);
            SYSTEMS
                .iter()
                .position(|system| system.prefixes.iter().any(is_prefix))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_result_has_its_section() {
        let name = |id| System::of(id).map(|index| SYSTEMS[index].name);
        for (id, system) in [
            ("apf.worker_ratio.mem", Some("apf")),
            ("arm64.apf.worker_ratio.latency_1ms", Some("arm64")),
            ("arm64.pml.cost_ratio.raw", Some("pml")),
            ("apf_arm64.alone_time_ratio.v4", Some("arm64")),
            ("letters.paging.exit_vs_queue.1vcpu", Some("paging")),
            ("unheard_of.things", None),
        ] {
            assert_eq!(name(id), system, "{id}");
        }
        let headlines = SYSTEMS
            .iter()
            .flat_map(|system| system.headlines.iter().map(|id| (id, system.name)));
        headlines.for_each(|(id, system)| assert_eq!(name(id), Some(system)));
    }
}
