//! The list of system calls. Each group says what needs it.
//!
//! Two filters: the list, and a few of its calls that fail with an error, because their callers
//! have another way, or report it.

use libc::*;
use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, apply_filter_all_threads,
};
use std::collections::BTreeMap;
use std::env::consts::ARCH;

/// Guest memory, the heap, stacks; the memory that a page-fault handler fills. `process_madvise` is
/// for this process; Landlock forbids it for others.
const MEMORY: &[c_long] = &[
    SYS_brk,
    SYS_madvise,
    SYS_membarrier,
    SYS_memfd_create,
    SYS_mincore,
    SYS_mlock,
    SYS_mlock2,
    SYS_mremap,
    SYS_msync,
    SYS_munlock,
    SYS_munmap,
    SYS_process_madvise,
    SYS_userfaultfd,
];

/// Threads, their processors and turns, and the waits of one for another. A new process is refused
/// below.
const THREADS: &[c_long] = &[
    SYS_clone,
    SYS_clone3,
    SYS_exit,
    SYS_exit_group,
    SYS_futex,
    SYS_futex_waitv,
    SYS_get_robust_list,
    SYS_getcpu,
    SYS_getpid,
    SYS_getppid,
    SYS_gettid,
    SYS_restart_syscall,
    SYS_rseq,
    SYS_sched_getaffinity,
    SYS_sched_getparam,
    SYS_sched_getscheduler,
    SYS_sched_setaffinity,
    SYS_sched_setscheduler,
    SYS_sched_yield,
    SYS_set_robust_list,
    SYS_set_tid_address,
];

/// Signals: an end of the run, and a kick of a vCPU's thread.
const SIGNALS: &[c_long] = &[
    SYS_rt_sigaction,
    SYS_rt_sigpending,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_rt_sigsuspend,
    SYS_rt_sigtimedwait,
    SYS_sigaltstack,
];

/// Time.
const TIME: &[c_long] = &[
    SYS_clock_getres,
    SYS_clock_gettime,
    SYS_clock_nanosleep,
    SYS_getrusage,
    SYS_gettimeofday,
    SYS_nanosleep,
    SYS_timerfd_create,
    SYS_timerfd_gettime,
    SYS_timerfd_settime,
    SYS_times,
];

/// Files: Landlock says which.
const FILES: &[c_long] = &[
    SYS_close,
    SYS_close_range,
    SYS_copy_file_range,
    SYS_dup,
    SYS_dup3,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_fadvise64,
    SYS_fallocate,
    SYS_fchmod,
    SYS_fchmodat,
    SYS_fcntl,
    SYS_fdatasync,
    SYS_flock,
    SYS_fstat,
    SYS_fstatfs,
    SYS_fsync,
    SYS_ftruncate,
    SYS_getcwd,
    SYS_getdents64,
    SYS_lseek,
    SYS_mkdirat,
    SYS_newfstatat,
    SYS_openat,
    SYS_pipe2,
    SYS_pread64,
    SYS_preadv,
    SYS_preadv2,
    SYS_pwrite64,
    SYS_pwritev,
    SYS_pwritev2,
    SYS_read,
    SYS_readahead,
    SYS_readlinkat,
    SYS_readv,
    SYS_renameat,
    SYS_renameat2,
    SYS_sendfile,
    SYS_statfs,
    SYS_statx,
    SYS_sync_file_range,
    SYS_umask,
    SYS_unlinkat,
    SYS_write,
    SYS_writev,
];

/// The same files, by the calls that only x86-64 has.
#[cfg(target_arch = "x86_64")]
const OLD: &[c_long] = &[
    SYS_access,
    SYS_arch_prctl,
    SYS_chmod,
    SYS_dup2,
    SYS_epoll_create,
    SYS_epoll_wait,
    SYS_eventfd,
    SYS_getdents,
    SYS_lstat,
    SYS_mkdir,
    SYS_open,
    SYS_pipe,
    SYS_poll,
    SYS_readlink,
    SYS_rename,
    SYS_rmdir,
    SYS_select,
    SYS_stat,
    SYS_time,
    SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[c_long] = &[];

/// Waits for descriptors, and io_uring, by which pages are read and swapped.
const EVENTS: &[c_long] = &[
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    SYS_eventfd2,
    SYS_io_uring_enter,
    SYS_io_uring_register,
    SYS_io_uring_setup,
    SYS_ppoll,
    SYS_pselect6,
];

/// Connections: clients of a control socket, migrations, page sources, metrics.
const SOCKETS: &[c_long] = &[
    SYS_accept,
    SYS_accept4,
    SYS_bind,
    SYS_connect,
    SYS_getpeername,
    SYS_getsockname,
    SYS_getsockopt,
    SYS_listen,
    SYS_recvfrom,
    SYS_recvmmsg,
    SYS_recvmsg,
    SYS_sendmmsg,
    SYS_sendmsg,
    SYS_sendto,
    SYS_setsockopt,
    SYS_shutdown,
    SYS_socket,
    SYS_socketpair,
];

/// Properties of the host and the process. `pidfd_getfd` copies a descriptor of this process, for
/// an address `fd:N`; Landlock forbids it for others.
const HOST: &[c_long] = &[
    SYS_getegid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getrandom,
    SYS_getrlimit,
    SYS_getuid,
    SYS_pidfd_getfd,
    SYS_pidfd_open,
    SYS_sysinfo,
    SYS_uname,
];

/// For [`Calls::processes`]: a pager that ends VMs.
const PROCESSES: &[c_long] = &[SYS_pidfd_send_signal];

/// The ioctls of terminals, sockets and files.
const IOCTLS: [c_ulong; 14] = [
    BLKGETSIZE64,
    FIOCLEX,
    FIONBIO,
    FIONREAD,
    TCGETS,
    TCGETS2,
    TCSETS,
    TCSETS2,
    TCSETSF,
    TCSETSF2,
    TCSETSW,
    TCSETSW2,
    TIOCGPGRP,
    TIOCGWINSZ,
];
/// `_IOR(0x12, 114, size_t)` (`<linux/fs.h>`).
const BLKGETSIZE64: c_ulong = 0x8008_1272;
/// The types of all ioctls of KVM and of userfaultfd, and PAGEMAP_SCAN with its number. The bits:
/// direction and size 16, type 8, number 8.
const TYPES: [(u64, u64); 3] = [(0xff00, 0xae00), (0xff00, 0xaa00), (0xffff, 0x6610)];

/// What prctl(2) may set: names of threads and mappings, and how exact timers are.
const PRCTLS: [c_int; 5] = [
    PR_GET_NAME,
    PR_GET_TIMERSLACK,
    PR_SET_NAME,
    PR_SET_TIMERSLACK,
    PR_SET_VMA,
];

/// Whether this kernel filters system calls.
pub fn has_seccomp() -> bool {
    rustix::thread::secure_computing_mode().is_ok()
}

/// Restricts all threads of the process to the list.
pub fn confine(calls: Calls) -> Result<(), Error> {
    apply_filter_all_threads(&refused(calls)?)?;
    // Last: the list has no seccomp(2).
    apply_filter_all_threads(&list(calls)?)
}

/// The system calls beyond the list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Calls {
    /// Sockets of UNIX with a name.
    pub unix: bool,
    /// Sockets of IPv4 and IPv6, and the libraries that find a host's address.
    pub internet: bool,
    /// Other processes: their memory, their descriptors, signals to them.
    pub processes: bool,
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The list: another call raises SIGSYS.
fn list(calls: Calls) -> Result<BpfProgram, Error> {
    let all = [
        MEMORY, THREADS, SIGNALS, TIME, FILES, OLD, EVENTS, SOCKETS, HOST,
    ]
    .concat();
    let mut rules: Rules = all.into_iter().map(|call| (call, vec![])).collect();
    if calls.processes {
        rules.extend(PROCESSES.iter().map(|call| (*call, vec![])));
    }
    let types = TYPES.map(|(mask, value)| vec![masked(1, mask, value)]);
    let ioctls = IOCTLS.map(|request| vec![is(1, request)]);
    rules.insert(SYS_ioctl, any(types.into_iter().chain(ioctls))?);
    rules.insert(
        SYS_prctl,
        any(PRCTLS.map(|option| vec![is(0, option as u64)]))?,
    );
    // Limits of this process are read, and not set.
    rules.insert(SYS_prlimit64, any([vec![is(0, 0), null(2)]])?);
    // A signal to a thread of this process.
    rules.insert(SYS_tgkill, any([vec![is(0, std::process::id().into())]])?);
    // No new code, except the libraries that find a host.
    let memory = match calls.internet {
        true => vec![],
        false => any([vec![masked(2, PROT_EXEC as u64, 0)]])?,
    };
    rules.insert(SYS_mmap, memory.clone());
    rules.insert(SYS_mprotect, memory);
    program(rules, SeccompAction::Trap, SeccompAction::Allow)
}

/// The calls of the list that fail with ENOSYS. The C library starts a thread by clone(2) then,
/// whose flags a filter can read, and finds a host without the daemons that it asks by sockets of
/// UNIX. It blocks all signals while it starts a process, so SIGSYS would end this one without a
/// message.
fn refused(calls: Calls) -> Result<BpfProgram, Error> {
    let families = [
        (calls.unix, AF_UNIX),
        (calls.internet, AF_INET),
        (calls.internet, AF_INET6),
        (calls.internet, AF_NETLINK),
    ];
    let families = families.into_iter().filter(|(allowed, _)| *allowed);
    let others: Vec<_> = families
        .map(|(_, family)| is_not(0, family as u64))
        .collect();
    let sockets = match others.is_empty() {
        true => vec![],
        false => any([others])?,
    };
    let process = any([vec![masked(0, CLONE_THREAD as u64, 0)]])?;
    let rules = Rules::from([
        (SYS_clone, process),
        (SYS_clone3, vec![]),
        (SYS_socket, sockets),
    ]);
    program(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(ENOSYS as u32),
    )
}

fn program(
    rules: Rules,
    mismatch: SeccompAction,
    matching: SeccompAction,
) -> Result<BpfProgram, Error> {
    let arch = ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, mismatch, matching, arch)?;
    Ok(filter.try_into()?)
}

/// Conditions on the arguments of a call, of which one list has to hold.
fn any(lists: impl IntoIterator<Item = Vec<SeccompCondition>>) -> Result<Vec<SeccompRule>, Error> {
    let rules = lists.into_iter().map(|list| Ok(SeccompRule::new(list)?));
    rules.collect()
}

fn is(argument: u8, value: u64) -> SeccompCondition {
    condition(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

fn is_not(argument: u8, value: u64) -> SeccompCondition {
    condition(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, value)
}

fn null(argument: u8) -> SeccompCondition {
    condition(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)
}

fn masked(argument: u8, mask: u64, value: u64) -> SeccompCondition {
    let op = SeccompCmpOp::MaskedEq(mask);
    condition(argument, SeccompCmpArgLen::Dword, op, value)
}

fn condition(
    argument: u8,
    len: SeccompCmpArgLen,
    op: SeccompCmpOp,
    value: u64,
) -> SeccompCondition {
    SeccompCondition::new(argument, len, op, value).expect("a system call has six arguments")
}
