//! The checks of `lacuna doctor`, one function each.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use lacuna::dirty::DetectedBy;
use lacuna::kvm::{KvmError, MemoryCapability, Tracker, VmBuilder};
use lacuna::{Apf, Builder as _, DirtyTracking as _, PageCount};
use lacuna_lab::external::find;
use lacuna_lab::host_info::{HostInfo, kib};
use lacuna_sandbox::{has_landlock, has_seccomp};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::Check;
use crate::size::Size;

/// With less than this, the default guest has no room beside other programs.
const COMFORTABLE_BYTES: u64 = 1 << 30;
/// Buffers, offsets and lengths of direct I/O must be multiples of this.
const BLOCK: usize = 4096;

pub(super) fn cpu(host: &HostInfo) -> Check {
    let found = format!("{} cores", host.cores);
    match host.cores {
        1 => Check::limited(
            "1 core",
            "two vCPUs share it, so figures with two vCPUs mean little",
        ),
        _ => Check::ok(found),
    }
}

pub(super) fn memory() -> Check {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let Some(available) = kib(&meminfo, "MemAvailable") else {
        return Check::missing("/proc/meminfo cannot be read", "mount /proc");
    };
    let total = kib(&meminfo, "MemTotal").unwrap_or(available);
    let found = format!("{} available of {}", Size(available), Size(total));
    if available < COMFORTABLE_BYTES {
        return Check::limited(found, "give guests less with --resident");
    }
    Check::ok(found)
}

/// The tightest memory limit of the control groups around this process.
pub(super) fn cgroup() -> Check {
    let memberships = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    match tightest_limit(&memberships, |path| fs::read_to_string(path).ok()) {
        Some(limit) if limit < COMFORTABLE_BYTES => {
            let found = format!("memory limited to {}", Size(limit));
            Check::limited(
                found,
                "raise the limit, or give guests less with --resident",
            )
        }
        Some(limit) => Check::ok(format!("memory limited to {}", Size(limit))),
        None => Check::ok("no memory limit"),
    }
}

/// Reads `/proc/self/cgroup` (`cgroups(7)`): version 2 has the line `0::PATH`, version 1 one with
/// `memory` among its controllers. Limits hold for all groups below, so each parent counts. In a
/// container the path may be the host's, and only the root of the mount is visible.
fn tightest_limit(memberships: &str, read: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let mut tightest: Option<u64> = None;
    for line in memberships.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let (mount, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            v1 if v1.split(',').any(|controller| controller == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        for group in Path::new(path).ancestors() {
            let group = group.to_string_lossy();
            let limit = read(&format!("{mount}{}/{file}", group.trim_end_matches('/')));
            // Version 2 says `max` for no limit, version 1 a number close to 2^63.
            let limit: Option<u64> = limit.and_then(|text| text.trim().parse().ok());
            let real = limit.filter(|limit| *limit < 1 << 60);
            tightest = [tightest, real].into_iter().flatten().min();
        }
    }
    tightest
}

/// Makes an unlinked file, as a run does, and writes one block past the page cache.
pub(super) fn swap(dir: &Path) -> Check {
    let shown = dir.display();
    let file = match tempfile::tempfile_in(dir) {
        Ok(file) => file,
        Err(error) => {
            let found = format!("{shown} cannot hold a file: {error}");
            return Check::missing(found, "choose a folder: --swap file,dir=PATH");
        }
    };
    let free = rustix::fs::fstatvfs(&file).map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    let free = Size(free);
    match direct_write(&file) {
        Ok(()) => Check::ok(format!("{shown}: direct I/O, {free} free")),
        Err(error) => Check::limited(
            format!("{shown}: {free} free, no direct I/O ({error})"),
            "swapped pages go through the host's page cache; a folder on ext4 or xfs avoids that",
        ),
    }
}

fn direct_write(file: &File) -> io::Result<()> {
    fcntl_setfl(file, fcntl_getfl(file)? | OFlags::DIRECT)?;
    let buffer = vec![0_u8; 2 * BLOCK];
    let aligned = buffer.as_ptr().align_offset(BLOCK);
    file.write_all_at(&buffer[aligned..aligned + BLOCK], 0)
}

pub(super) fn io_uring() -> Check {
    match io_uring::IoUring::new(1) {
        Ok(_) => Check::ok("can be set up"),
        Err(error) => {
            let setting = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
            let found = match setting.as_deref().map(str::trim) {
                Ok(value) if value != "0" => format!("kernel.io_uring_disabled={value}"),
                _ => format!("cannot be set up: {error}"),
            };
            let advice = "swap uses threads instead; allow io_uring by sysctl or in seccomp";
            Check::missing(found, advice)
        }
    }
}

pub(super) fn huge_pages() -> Check {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let setting = fs::read_to_string(path).unwrap_or_default();
    match selected(&setting) {
        Some("never") => Check::limited(
            "transparent huge pages: never",
            format!("echo madvise > {path}"),
        ),
        Some(mode) => Check::ok(format!("transparent huge pages: {mode}")),
        None => Check::missing(
            "this kernel has no transparent huge pages",
            "the frame pool uses 4 KiB pages; a kernel with CONFIG_TRANSPARENT_HUGEPAGE is faster",
        ),
    }
}

/// Reserved huge pages, for `--memory-kind hugetlbfs`.
pub(super) fn hugetlbfs() -> Check {
    let folder = "/sys/kernel/mm/hugepages/hugepages";
    let count = |size: &str| {
        let text = fs::read_to_string(format!("{folder}-{size}/free_hugepages")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let advice = "--memory-kind hugetlbfs needs them: echo 1024 > /proc/sys/vm/nr_hugepages";
    match (count("2048kB"), count("1048576kB").unwrap_or(0)) {
        (None, _) => Check::missing("this kernel has no reserved huge pages", advice),
        (Some(0), 0) => Check::limited("no free reserved pages of 2M or of 1G", advice),
        (Some(small), large) => {
            let found = format!("{small} free reserved pages of 2M, {large} of 1G");
            Check::ok(found)
        }
    }
}

/// The chosen value of a setting like `always [madvise] never`.
fn selected(setting: &str) -> Option<&str> {
    setting
        .split_whitespace()
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

/// Whether userfaultfd works, and for which faults. Safe code cannot make the system call. The
/// kernel's settings give the same answer, except inside a seccomp filter.
pub(super) fn userfaultfd() -> Check {
    let setting = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd");
    match (setting.as_deref().map(str::trim), device) {
        (Err(_), Err(_)) => Check::missing(
            "this kernel has none",
            "the kvm backend needs a kernel with CONFIG_USERFAULTFD",
        ),
        (_, Ok(_)) => Check::ok("/dev/userfaultfd opens; it handles kernel-mode faults too"),
        (Ok("1"), _) => Check::ok("every user may use it, for kernel-mode faults too"),
        (Ok(_), Err(_)) if rustix::process::geteuid().is_root() => {
            Check::ok("root may use it, for kernel-mode faults too")
        }
        _ => Check::limited(
            "it handles user-mode faults only",
            "enough for the soft backend; kvm needs sysctl vm.unprivileged_userfaultfd=1",
        ),
    }
}

/// What confines a process of `lacuna run`, `serve` and `pager`.
pub(super) fn sandbox() -> Check {
    let advice = "run them as a user of their own: a guest that takes the process over gets all \
                  that this user has (docs/sandbox.md)";
    match (has_landlock(), has_seccomp()) {
        (true, true) => Check::ok("Landlock confines files, seccomp system calls"),
        (false, true) => Check::limited("seccomp confines system calls; no Landlock", advice),
        (true, false) => Check::limited("Landlock confines files; no seccomp", advice),
        (false, false) => Check::missing("neither Landlock nor seccomp", advice),
    }
}

/// Makes a VM, because a kernel's build options do not say what it allows.
pub(super) fn kvm() -> Check {
    let nested = "in a virtual machine, turn on nested virtualisation; the soft backend needs none";
    if let Err(why) = lacuna::kvm::available() {
        return Check::missing(why.to_string(), nested);
    }
    // Less than its memory is resident, because that needs most of the kernel.
    let [memory, resident] = [8, 4].map(|mib| PageCount::from_bytes(mib << 20));
    match VmBuilder::new(memory, resident).build() {
        Ok(_) => Check::ok("/dev/kvm runs guests, with asynchronous page faults"),
        Err(KvmError::NoApf) => Check::limited(
            "/dev/kvm runs guests, without asynchronous page faults",
            "CPUID 0x40000001 lacks bits 4 and 14; the soft backend has them anyway",
        ),
        Err(why) => Check::limited(why.to_string(), nested),
    }
}

/// KVM's capabilities for a guest's memory, and what Lacuna does with each. None without KVM.
pub(super) fn kvm_memory() -> Vec<Check> {
    let Ok(offered) = lacuna::kvm::memory_capabilities() else {
        return Vec::new();
    };
    let all = MemoryCapability::ALL.into_iter();
    all.map(|one| kvm_capability(one, offered.contains(&one)))
        .collect()
}

/// What detects guests' writes: by KVM, and by the page map. None without KVM.
pub(super) fn kvm_writes() -> Vec<Check> {
    let size = PageCount::from_bytes(8 << 20);
    let detected_by = |tracker| {
        let vm = VmBuilder {
            tracker,
            apf: Apf::Off,
            ..VmBuilder::new(size, size)
        };
        vm.build().map(|vm| vm.detected_by())
    };
    let Ok(by) = detected_by(Tracker::Kvm) else {
        return Vec::new();
    };
    let writes = match (by, Path::new("/sys/module/kvm_intel").exists()) {
        (DetectedBy::WriteProtect, true) => Check::limited(
            format!("guests' writes are detected by {by}"),
            "modprobe kvm_intel with pml=1, if the processor has page-modification logging",
        ),
        _ => Check::ok(format!("guests' writes are detected by {by}")),
    };
    let pagemap = match detected_by(Tracker::Pagemap) {
        Ok(by) => Check::ok(format!("{by} detects them too (PAGEMAP_SCAN)")),
        Err(why) => Check::limited(
            why.to_string(),
            "a VMM cannot choose lacuna::kvm::Tracker::Pagemap; KVM's own log needs nothing",
        ),
    };
    vec![writes.named("kvm_writes"), pagemap.named("kvm_pagemap")]
}

fn kvm_capability(capability: MemoryCapability, is_offered: bool) -> Check {
    use MemoryCapability::{
        DirtyRing, LogInitiallySet, MappedGuestMemfd, MemoryFaultExit, PreFault,
    };
    let (id, name, since) = match capability {
        LogInitiallySet => ("kvm_log", "KVM_DIRTY_LOG_INITIALLY_SET", "5.7"),
        DirtyRing => ("kvm_ring", "dirty rings", "5.11"),
        MemoryFaultExit => ("kvm_fault", "KVM_EXIT_MEMORY_FAULT", "6.8"),
        PreFault => ("kvm_prefault", "KVM_PRE_FAULT_MEMORY", "6.12"),
        MappedGuestMemfd => ("kvm_memfd", "guest_memfd with mmap", "6.18"),
    };
    let found = match is_offered {
        true => name.to_owned(),
        false => format!("no {name} (Linux {since})"),
    };
    let not_used = |why| Check::ok(format!("{found}; not used: {why}"));
    let check = match (capability, is_offered) {
        (LogInitiallySet, true) => Check::ok(format!("{found} begins logs of writes")),
        (LogInitiallySet, false) => Check::limited(
            found,
            "logs of writes begin more slowly, and none with all pages set",
        ),
        (DirtyRing, true) => Check::ok(found),
        (DirtyRing, false) => Check::limited(found, "--delivery ring is refused"),
        (MemoryFaultExit, true) => Check::ok(format!(
            "{found} gives errors an address, where KVM has one"
        )),
        (MemoryFaultExit, false) => {
            Check::limited(found, "errors do not name the address of a failed access")
        }
        (PreFault, _) => not_used("guests map what they touch"),
        (MappedGuestMemfd, _) => not_used("userfaultfd does not take it"),
    };
    check.named(id)
}

pub(super) fn compiler() -> Check {
    match ["cc", "gcc", "clang"].into_iter().find_map(find) {
        Some(path) => Check::ok(path.display().to_string()),
        None => Check::missing(
            "no C compiler",
            "building Lacuna's guests needs one: sudo apt-get install gcc",
        ),
    }
}

pub(super) fn qemu() -> Check {
    match find("qemu-system-x86_64") {
        Some(path) => Check::ok(path.display().to_string()),
        None => Check::missing(
            "qemu-system-x86_64 is not installed",
            "`lacuna lab base` compares with it: sudo apt-get install qemu-system-x86",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn the_tightest_group_counts() {
        let limit = |memberships: &str, files: &[(&str, &str)]| {
            tightest_limit(memberships, |path| {
                let (_, text) = files.iter().find(|(name, _)| *name == path)?;
                Some((*text).to_owned())
            })
        };
        let v2 = [
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/memory.max", "1048576\n"),
            ("/sys/fs/cgroup/memory.max", "4194304\n"),
        ];
        assert_eq!(limit("0::/a/b\n", &v2), Some(1 << 20));
        assert_eq!(
            limit("0::/elsewhere\n", &v2),
            Some(4 << 20),
            "the mount's root still counts"
        );
        assert_eq!(limit("0::/a/b\n", &v2[..1]), None);
        let v1 = [(
            "/sys/fs/cgroup/memory/x/memory.limit_in_bytes",
            "9223372036854771712\n",
        )];
        assert_eq!(limit("5:cpu,memory:/x\n4:freezer:/\n", &v1), None);
        let v1 = [(
            "/sys/fs/cgroup/memory/x/memory.limit_in_bytes",
            "134217728\n",
        )];
        assert_eq!(
            limit("5:cpu,memory:/x\n4:freezer:/\n", &v1),
            Some(128 << 20)
        );
    }

    /// Only a capability that Lacuna uses is ever lacking.
    #[test]
    fn capabilities_of_kvm_are_named_with_their_use() {
        for capability in MemoryCapability::ALL {
            let [with, without] = [true, false].map(|has| kvm_capability(capability, has));
            assert_eq!((with.id, with.state), (without.id, State::Ok));
            assert!(without.found.starts_with("no "), "{}", without.found);
            let is_used = !with.found.contains("not used");
            assert_eq!(is_used, without.state == State::Limited, "{}", with.id);
        }
    }

    #[test]
    fn settings_with_a_choice() {
        assert_eq!(selected("always [madvise] never\n"), Some("madvise"));
        assert_eq!(selected(""), None);
    }
}
