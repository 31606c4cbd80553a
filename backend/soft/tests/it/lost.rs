//! The kernel takes guest memory away: the VM's vCPUs fail, and no value derived from the zeros in
//! its place leaves the VM.

use crate::common;

use common::program::{self, CODE, Piece, assemble, tell};
use common::{Lines, Zeros, builder, image, start};
use iced_x86::code_asm::*;
use lacuna_addr::{BackingRange, Gpa};
use lacuna_machine::{
    Ending, Exit, GuestMemory as _, Image, MemoryError, PlatformDevices, SaveRestore as _,
    Vcpu as _, VcpuError, Vm as _,
};
use lacuna_skip::test;
use lacuna_soft::{
    BootMemory, Host, HostError, LinuxError, MemoryKind, SoftError, Vcpu, Vm, VmBuilder,
};
use lacuna_sync::{Clock, HostClock};
use std::sync::Arc;
use std::thread::{scope, yield_now};

/// The taken page.
const DATA: u64 = 0x30_0000;
const PORT_RUNS: u16 = 0x80;
const PORT_WRONG: u16 = 0x81;

/// As [`boot_in`], with private memory.
fn boot(builder: &VmBuilder, image: &Image<'_>) -> (Arc<Host>, Arc<Vm>, Vec<Vcpu>) {
    boot_in(MemoryKind::Linux, builder, image)
}

/// A VM with memory from Linux, and its host. Ends the test if there is no userfaultfd.
fn boot_in(
    kind: MemoryKind,
    builder: &VmBuilder,
    image: &Image<'_>,
) -> (Arc<Host>, Arc<Vm>, Vec<Vcpu>) {
    let builder = VmBuilder {
        memory_kind: kind,
        ..builder.clone()
    };
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let host = builder.host(Arc::clone(&clock)).unwrap();
    let config = lacuna_soft::VmConfig {
        memory: builder.memory,
        vcpus: builder.vcpus,
        ..lacuna_soft::VmConfig::default()
    };
    let memory = BootMemory {
        kind,
        source: Some(Arc::new(Zeros)),
        ..BootMemory::default()
    };
    let vm = match Vm::with_memory(Arc::clone(&host), clock, config, memory) {
        Ok(vm) => vm,
        Err(SoftError::Host(refused @ HostError::Linux(LinuxError::Userfaultfd(_)))) => {
            lacuna_skip::skip_test(refused)
        }
        Err(error) => panic!("{error}"),
    };
    let vcpus = vm.boot(image, &builder.full_command_line()).unwrap();
    (host, vm, vcpus)
}

fn take_away(vm: &Vm, gpa: Gpa, pages: u64) {
    let slots = vm.mmu().slots();
    let backing = slots.find(gpa.gfn()).unwrap().backing_of(gpa.gfn());
    vm.host()
        .take_away(BackingRange::new(backing, pages).unwrap())
        .unwrap();
}

/// Reports once that it runs. Then reads the word at DATA for ever, and reports every value but
/// one.
fn reader() -> Vec<Piece> {
    let code = assemble(CODE, |a| {
        let (mut again, mut wrong) = (a.create_label(), a.create_label());
        a.mov(rbx, DATA)?;
        tell(a, 1)?;
        a.set_label(&mut again)?;
        a.mov(rax, ptr(rbx))?;
        a.cmp(rax, 0x55)?;
        a.jne(wrong)?;
        a.jmp(again)?;
        a.set_label(&mut wrong)?;
        a.mov(ptr(rbx + 0x1000), rax)?;
        a.out(i32::from(PORT_WRONG), al)?;
        a.jmp(again)
    });
    vec![code, program::words(DATA, &[0x55])]
}

fn expect_running(exit: Result<Exit, VcpuError>) {
    assert!(
        matches!(exit, Ok(Exit::IoOut { port, .. }) if port == PORT_RUNS),
        "{exit:?}"
    );
}

fn expect_lost(exit: Result<Exit, VcpuError>) {
    let data = Gpa::new(DATA).unwrap();
    assert!(
        matches!(&exit, Err(VcpuError::PageLost { gpa, .. }) if *gpa == data),
        "{exit:?}"
    );
}

/// The vCPU fails, and its exit with the wrong value is never seen. It fails again until a reset.
/// Then it finds the page lost.
#[test]
fn a_page_is_taken_from_a_running_vcpu() {
    for _ in 0..20 {
        let pieces = reader();
        let (host, vm, mut vcpus) = boot(&builder(16, 8, 1, ""), &program::image(&pieces));
        let vcpu = &mut vcpus[0];
        expect_running(vcpu.run());
        let exit = scope(|scope| {
            let running = scope.spawn(|| vcpu.run());
            // The page has a leaf, so no fault finds it lost.
            while vm.retired()[0] < 100_000 {
                yield_now();
            }
            take_away(&vm, Gpa::new(DATA).unwrap(), 1);
            running.join().unwrap()
        });
        expect_lost(exit);
        assert_eq!(host.losses(), 1, "by a signal");
        expect_lost(vcpu.run());
        let refused = vcpu.save().unwrap_err().to_string();
        assert!(refused.contains("has lost a page"), "{refused}");
        vm.mmu().verify();
        host.verify();
        vcpu.reset();
        expect_running(vcpu.run());
        expect_lost(vcpu.run());
        assert_eq!(host.losses(), 1, "by its page word");
        vm.mmu().verify();
        host.verify();
    }
}

/// The memory file is shortened under a running vCPU.
#[test]
fn a_memory_file_becomes_shorter() {
    let pieces = reader();
    let (host, vm, mut vcpus) = boot_in(
        MemoryKind::Shared,
        &builder(16, 8, 1, ""),
        &program::image(&pieces),
    );
    let vcpu = &mut vcpus[0];
    expect_running(vcpu.run());
    let exit = scope(|scope| {
        let running = scope.spawn(|| vcpu.run());
        while vm.retired()[0] < 100_000 {
            yield_now();
        }
        let file = vm.shared_file().unwrap().file;
        rustix::fs::ftruncate(file, DATA).unwrap();
        running.join().unwrap()
    });
    expect_lost(exit);
    assert_eq!(host.losses(), 1, "by a signal");
    vm.mmu().verify();
    host.verify();
}

/// A device's access fails. The vCPU may have read the zeros in the page's place, so it fails too.
#[test]
fn a_page_is_taken_from_a_device() {
    let pieces = reader();
    let (host, vm, mut vcpus) = boot(&builder(16, 8, 1, ""), &program::image(&pieces));
    expect_running(vcpus[0].run());
    let (data, mut word) = (Gpa::new(DATA).unwrap(), [0; 8]);
    vm.read(data, &mut word).unwrap();
    assert_eq!(u64::from_le_bytes(word), 0x55);
    take_away(&vm, data, 1);
    for _ in 0..2 {
        let error = vm.read(data, &mut word).unwrap_err();
        let MemoryError::Backing { gpa, cause, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(gpa, data);
        assert!(cause.contains("Linux has taken its memory away"), "{cause}");
        assert!(vm.write(data, &word).is_err());
        assert!(!vm.peek(data, &mut word));
    }
    expect_lost(vcpus[0].run());
    assert_eq!(host.losses(), 1);
    vm.mmu().verify();
    host.verify();
}

/// All memory is taken from a guest with two vCPUs. The run ends, and each vCPU reports why.
#[test]
fn all_memory_is_taken() {
    let builder = builder(16, 24, 2, "faulters=2 workers=2 accesses=1000000");
    let (host, vm, vcpus) = boot(&builder, &image("bm"));
    let devices = Arc::new(PlatformDevices::new(Lines::default().sink()));
    let running = start(&vm, vcpus, &devices);
    while vm.retired().iter().any(|&retired| retired < 1_000_000) {
        yield_now();
        assert!(devices.ending().is_none());
    }
    for slot in vm.mmu().slots().iter() {
        take_away(&vm, slot.gfns.start().gpa(), slot.gfns.pages());
    }
    let mut vcpus = running.into_vcpus();
    let ending = devices.ending();
    assert!(
        matches!(ending, Some(Ending::Failed(VcpuError::PageLost { .. }))),
        "{ending:?}"
    );
    assert!(host.losses() > 0);
    for vcpu in &mut vcpus {
        vm.withdraw_kicks();
        let failed = vcpu.run();
        assert!(
            matches!(failed, Err(VcpuError::PageLost { .. })),
            "{failed:?}"
        );
    }
    vm.mmu().verify();
    host.verify();
}

/// Set in the process whose threads block the signal.
const CHILD: &str = "LACUNA_BLOCKED";

/// A VMM's threads block `SIGBUS`, as in programs that read signals elsewhere: its vCPU fails, and
/// the process survives.
#[test]
fn a_page_is_taken_from_a_vcpu_that_blocks_the_signal() {
    let own = "lost::a_page_is_taken_from_a_vcpu_that_blocks_the_signal";
    if std::env::var_os(CHILD).is_none() {
        // `env` of GNU coreutils 8.31.
        let blocks = |program: &std::ffi::OsStr, args: &[&str]| {
            let mut command = std::process::Command::new("env");
            command.arg("--block-signal=BUS").arg(program);
            command.args(args).env(CHILD, "1").output()
        };
        if !blocks("true".as_ref(), &[]).is_ok_and(|output| output.status.success()) {
            return lacuna_skip::skip("env(1) cannot block signals");
        }
        let program = std::env::current_exe().unwrap();
        let output = blocks(program.as_os_str(), &["--exact", own, "--nocapture"]).unwrap();
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let pieces = reader();
    let image = program::image(&pieces);
    scope(|scope| {
        // Use separate threads: a thread that accesses Linux memory unblocks the signal, and its
        // later child threads take the signal too.
        let booted = scope.spawn(|| boot(&builder(16, 8, 1, ""), &image));
        let (host, vm, mut vcpus) = booted.join().unwrap();
        let running = scope.spawn(move || {
            expect_running(vcpus[0].run());
            vcpus[0].run()
        });
        while vm.retired()[0] < 100_000 {
            yield_now();
        }
        take_away(&vm, Gpa::new(DATA).unwrap(), 1);
        expect_lost(running.join().unwrap());
        assert_eq!(host.losses(), 1, "by a signal");
    });
}
