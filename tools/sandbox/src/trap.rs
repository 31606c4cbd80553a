//! The message about a forbidden system call.

use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, Ordering};

/// The exit code of a process that the handler ends.
static CODE: AtomicI32 = AtomicI32::new(0);

/// Installs the handler of SIGSYS, which a forbidden system call raises in its thread.
pub fn install(code: u8) -> io::Result<()> {
    CODE.store(code.into(), Ordering::Relaxed);
    // SAFETY: 1. all zeros is a valid `sigaction`. 2. The handler has the signature that SA_SIGINFO
    // promises. 3. It calls only write(2) and _exit(2), which are async-signal-safe.
    let result = unsafe {
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = on_sigsys as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSYS, &raw const action, null_mut())
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// `siginfo_t` of SIGSYS (`<asm-generic/siginfo.h>`): after three words and, on 64-bit hosts,
/// padding.
#[repr(C)]
struct SigSys {
    signo: i32,
    errno: i32,
    code: i32,
    padding: i32,
    address: usize,
    call: i32,
    arch: u32,
}

extern "C" fn on_sigsys(_: i32, info: *const libc::siginfo_t, _: *const libc::c_void) {
    // SAFETY: the kernel passes a `siginfo_t` of SIGSYS, which is larger than the read fields.
    let call = unsafe { (*info.cast::<SigSys>()).call };
    let mut digits = [0; 20];
    let parts: [&[u8]; 6] = [
        b"lacuna: the sandbox forbids the system call ",
        name(call.into()).as_bytes(),
        b" (number ",
        decimal(call.unsigned_abs(), &mut digits),
        b"), so the process ends: docs/sandbox.md. If lacuna needs this call, report it, ",
        b"and run with --no-sandbox meanwhile; if not, a guest, a peer or a file has caused it\n",
    ];
    let mut line = [0; 512];
    let mut len = 0;
    for part in parts {
        line[len..len + part.len()].copy_from_slice(part);
        len += part.len();
    }
    // SAFETY: the buffer has `len` bytes; _exit does not return. No destructor runs: the thread may
    // hold any lock.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), len);
        libc::_exit(CODE.load(Ordering::Relaxed));
    }
}

fn decimal(mut number: u32, digits: &mut [u8; 20]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &digits[at..];
        }
    }
}

/// The name of a system call that an attack is likely to need, or a new version of this program.
fn name(number: i64) -> &'static str {
    macro_rules! find {
        ($($name:ident)*) => {
            match number {
                $(libc::$name => stringify!($name).split_at(PREFIX.len()).1,)*
                _ => "of unknown name",
            }
        };
    }
    const PREFIX: &str = "SYS_";
    find! {
        SYS_acct SYS_add_key SYS_adjtimex SYS_bpf SYS_capset SYS_chdir SYS_chroot SYS_clock_settime
        SYS_clone SYS_delete_module SYS_execve SYS_execveat SYS_fanotify_init SYS_fchdir
        SYS_finit_module SYS_fsetxattr SYS_init_module SYS_inotify_init1 SYS_ioctl SYS_kcmp
        SYS_kexec_file_load SYS_kexec_load SYS_keyctl SYS_kill SYS_linkat SYS_mbind SYS_memfd_secret
        SYS_mknodat SYS_mmap SYS_mount SYS_mprotect SYS_name_to_handle_at SYS_open_by_handle_at
        SYS_open_tree SYS_perf_event_open SYS_personality SYS_pidfd_getfd SYS_pidfd_open
        SYS_pidfd_send_signal SYS_pivot_root SYS_pkey_mprotect SYS_prctl SYS_prlimit64
        SYS_process_madvise SYS_process_vm_readv SYS_process_vm_writev SYS_ptrace SYS_reboot
        SYS_request_key SYS_rt_sigqueueinfo SYS_setgid SYS_sethostname SYS_setns SYS_setpgid
        SYS_setpriority SYS_setregid SYS_setresgid SYS_setresuid SYS_setreuid SYS_setrlimit
        SYS_setsid SYS_settimeofday SYS_setuid SYS_socket SYS_splice SYS_swapoff SYS_swapon
        SYS_symlinkat SYS_syslog SYS_tgkill SYS_timer_create SYS_tkill SYS_umount2 SYS_unshare
        SYS_vmsplice SYS_wait4 SYS_waitid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names() {
        assert_eq!(decimal(0, &mut [0; 20]), b"0");
        assert_eq!(decimal(4_294_967_295, &mut [0; 20]), b"4294967295");
        assert_eq!(name(libc::SYS_ptrace), "ptrace");
        assert_eq!(name(-1), "of unknown name");
    }
}
