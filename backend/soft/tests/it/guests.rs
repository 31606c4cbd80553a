//! Guests that test the processor, and guests that try to break out of the VM.

use crate::common;

use common::{Lines, boot, boot_image, builder, builder_for, image, pass, program, run, start};
use iced_x86::code_asm::*;
use lacuna_addr::PageCount;
use lacuna_guest::status::Status;
use lacuna_host::{Fault, FaultyStore, Host, HostConfig, HugePages, Io};
use lacuna_machine::{
    Arch, Ending, GuestMemory, Kick, Next, PlatformDevices, VCPUS_MAX, VcpuError, dispatch,
};
use lacuna_skip::test;
use lacuna_soft::{SimulatedVm, Simulator, SimulatorConfig, Step, Vcpu, Vm, VmBuilder, Wait};
use lacuna_sync::{Clock, HostClock, VirtualClock};
use std::sync::Arc;

#[test]
fn all_workloads_succeed() {
    pass(&builder(64, 64, 2, "seconds=1"), "bm");
    pass(&builder(32, 8, 2, "rounds=1"), "membound");
    pass(&builder(32, 32, 2, ""), "touch");
    pass(&builder(32, 8, 2, "order=random"), "touch");
}

/// Each process has its own address space, and those beyond the tags of AArch64 share one.
#[test]
fn each_of_256_vcpus_runs_a_process_in_a_seeded_run() {
    for arch in [Arch::X86_64, Arch::Arm64] {
        let words = "faulters=256 workers=0 accesses=10";
        let run = || {
            let seeded = VmBuilder {
                seed: Some(9),
                ..builder_for(arch, (256, 256), VCPUS_MAX, words)
            };
            pass(&seeded, "bm")
        };
        let ((outcome, printed), (again, _)) = (run(), run());
        assert_eq!(
            outcome.trace.expect("a seeded run"),
            again.trace.expect("another")
        );
        for index in 0..VCPUS_MAX {
            let line = format!("thread=faulter{index} kind=faulter cpu={index} count=10\n");
            assert!(printed.contains(&line), "{arch}: {line}");
        }
    }
}

struct NoKick;

impl Kick for NoKick {
    fn kick(&self, _: usize) {}

    fn kick_all(&self) {}
}

/// Runs one vCPU of several until it halts.
fn run_to_halt(vcpu: &mut Vcpu, devices: &PlatformDevices) {
    for _ in 0..100_000 {
        match vcpu.step(10_000) {
            Step::Ran => {}
            Step::Exit(exit) => assert_eq!(dispatch(vcpu, Ok(exit), devices, &NoKick), Next::Enter),
            Step::Wait(Wait::Halt(_)) => return,
            _ => panic!("the vCPU stopped"),
        }
    }
    panic!("the vCPU never halts");
}

/// The first vCPU starts all threads before the second vCPU has executed an instruction.
#[test]
fn a_thread_is_shown_on_its_vcpu_before_that_vcpu_has_started() {
    let builder = builder(32, 32, 2, "faulters=2 workers=0 accesses=10");
    let clock: Arc<dyn Clock> = Arc::new(VirtualClock::default());
    let host = builder.host(Arc::clone(&clock)).unwrap();
    let (vm, mut vcpus, devices, lines) = boot(&builder, &host, clock, "bm");
    run_to_halt(&mut vcpus[0], &devices);
    assert_eq!(shown_vcpus(&vm, &devices), [0, 0, 1], "{}", lines.text());
}

/// The vCPU of each thread on the status page.
fn shown_vcpus(vm: &Vm, devices: &PlatformDevices) -> Vec<u32> {
    let mut page = vec![0; 4096];
    let at = devices.status_page().expect("the guest has announced it");
    vm.read(at.gpa(), &mut page).unwrap();
    let threads = Status::parse(&page).unwrap().threads;
    threads.iter().map(|thread| thread.cpu).collect()
}

/// Operands of system instructions at addresses without memory: a read returns ones, a write is
/// lost.
#[test]
fn system_instructions_may_have_their_operand_in_a_device() {
    const HOLE: u64 = 0xd000_0000;
    let piece = program::assemble(program::CODE, |a| {
        a.mov(rdi, HOLE)?;
        a.smsw(word_ptr(rdi))?;
        a.sgdt(ptr(rdi))?;
        a.mov(word_ptr(rdi), ds)?;
        a.lmsw(word_ptr(rdi))?;
        a.clts()?;
        a.mov(al, 0)?;
        a.out(0xf4, al)
    });
    let builder = builder(32, 32, 1, "");
    let clock: Arc<dyn Clock> = Arc::new(VirtualClock::default());
    let host = builder.host(Arc::clone(&clock)).unwrap();
    let pieces = [piece];
    let image = program::image(&pieces);
    let (_vm, mut vcpus, devices, _) = boot_image(&builder, &host, clock, &image, |_| ());
    while devices.ending().is_none() {
        match vcpus[0].step(1000) {
            Step::Ran => {}
            Step::Exit(exit) => {
                let _ = dispatch(&mut vcpus[0], Ok(exit), &devices, &NoKick);
            }
            _ => panic!("the vCPU stopped"),
        }
    }
    let ending = devices.ending();
    assert!(matches!(ending, Some(Ending::Exited(0))), "{ending:?}");
}

#[test]
fn memory_order_and_split_locks() {
    pass(&builder(32, 32, 2, "iters=3000 adds=3000"), "litmus");
}

#[test]
fn modified_code_is_seen() {
    pass(&builder(32, 32, 2, "iters=300"), "smc");
}

/// Another guest, which uses all frames, runs beside it in the smallest budget for two vCPUs.
#[test]
fn the_instruction_with_the_most_pages_completes_at_the_minimum_budget() {
    let clock = Arc::new(VirtualClock::default());
    let builder = VmBuilder {
        seed: Some(1),
        ..builder(16, 1, 1, "iters=20 rounds=1")
    };
    let builder = VmBuilder {
        resident: Host::minimum_budget(2),
        ..builder
    };
    let host = builder.host(Arc::clone(&clock) as Arc<dyn Clock>).unwrap();
    let config = SimulatorConfig {
        seed: 1,
        clock: Arc::clone(&clock),
        host: Arc::clone(&host),
    };
    let mut simulator = Simulator::new(config);
    let devices = ["maxpage", "verify"].map(|name| {
        let shared = Arc::clone(&clock) as Arc<dyn Clock>;
        let (vm, vcpus, devices, lines) = boot(&builder, &host, shared, name);
        simulator.add(SimulatedVm {
            vm,
            vcpus,
            devices: Arc::clone(&devices),
        });
        (devices, lines)
    });
    simulator.run(|| ());
    for (devices, lines) in devices {
        let ending = devices.ending();
        assert!(
            matches!(ending, Some(Ending::Exited(0))),
            "{ending:?}\n{}",
            lines.text()
        );
    }
    assert!(host.stats().swapped_in > 1000, "{:?}", host.stats());
}

#[test]
fn random_bytes_in_user_mode_do_no_harm() {
    for seed in 0..4 {
        pass(
            &builder(32, 32, 2, &format!("level=3 seed={} count=50", seed * 1000)),
            "random",
        );
    }
}

/// The guest may do anything; the host must neither panic nor hang.
#[test]
fn random_bytes_in_kernel_mode_end_somehow() {
    for seed in 0..24 {
        let command_line = format!("level=0 seed={seed}");
        let builder = VmBuilder {
            seed: Some(seed),
            ..builder(16, 16, 1, &command_line)
        };
        bounded(&builder, "random");
    }
}

/// Runs for at most some virtual seconds. An endless guest is stopped, as by a user.
fn bounded(builder: &VmBuilder, name: &str) -> Option<Ending> {
    let clock = Arc::new(VirtualClock::default());
    let host = builder.host(Arc::clone(&clock) as Arc<dyn Clock>).unwrap();
    let shared = Arc::clone(&clock) as Arc<dyn Clock>;
    let (vm, vcpus, devices, _) = boot(builder, &host, shared, name);
    let seed = builder.seed.expect("a seeded builder");
    let config = SimulatorConfig {
        seed,
        clock: Arc::clone(&clock),
        host,
    };
    let mut simulator = Simulator::new(config);
    let (stop_vm, stop_board) = (Arc::clone(&vm), Arc::clone(&devices));
    simulator.add(SimulatedVm {
        vm,
        vcpus,
        devices: Arc::clone(&devices),
    });
    simulator.run(|| {
        if clock.now().0 > 300_000_000 {
            stop_board.end(Ending::Stopped, &*stop_vm);
        }
    });
    devices.ending()
}

#[test]
fn nonsense_in_every_msr() {
    pass(&builder(32, 32, 1, "count=20000"), "msr");
    for seed in 0..4 {
        let command_line = format!("wild=1 seed={seed}");
        let builder = VmBuilder {
            seed: Some(seed),
            ..builder(16, 16, 1, &command_line)
        };
        bounded(&builder, "msr");
    }
}

#[test]
fn a_triple_fault_is_reported_with_its_address() {
    let (outcome, _) = run(&builder(32, 32, 1, ""), "triple");
    let Ending::Shutdown(text) = outcome.ending else {
        panic!("{:?}", outcome.ending)
    };
    assert!(text.starts_with("vCPU 0: triple fault: vector "), "{text}");
}

fn faulty(budget_mib: u64) -> (Arc<Host>, FaultyStore, Arc<dyn Clock>) {
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let store = FaultyStore::new(PageCount::new(1 << 16));
    let host = Host::new(HostConfig {
        budget: PageCount::from_bytes(budget_mib * common::MIB),
        huge: HugePages::Never,
        swap: Box::new(store.clone()),
        io: Io::Threads { readers: 2 },
        clock: Arc::clone(&clock),
    });
    (host.unwrap(), store, clock)
}

fn run_faulty(fault: Fault) -> (Ending, Lines) {
    let (host, store, clock) = faulty(8);
    let builder = builder(32, 8, 2, "rounds=3");
    let (vm, vcpus, devices, lines) = boot(&builder, &host, clock, "verify");
    store.set_fault(Some(fault));
    start(&vm, vcpus, &devices).wait();
    (devices.ending().expect("it ended"), lines)
}

#[test]
fn a_read_error_ends_the_run_before_the_guest_can_read_anything_wrong() {
    let (ending, lines) = run_faulty(Fault::Read);
    let Ending::Failed(error) = ending else {
        panic!("{ending:?}\n{}", lines.text())
    };
    assert!(matches!(error, VcpuError::PageLost { .. }), "{error}");
    assert!(error.to_string().contains("is lost"), "{error}");
    assert!(
        !lines.text().contains("lost"),
        "the guest noticed: {}",
        lines.text()
    );
}

#[test]
fn a_full_disk_ends_the_run_with_nothing_lost() {
    let (host, _, clock) = faulty(8);
    drop(host);
    let store = FaultyStore::new(PageCount::new(1000));
    let host = Host::new(HostConfig {
        budget: PageCount::from_bytes(8 * common::MIB),
        huge: HugePages::Never,
        swap: Box::new(store),
        io: Io::Threads { readers: 2 },
        clock: Arc::clone(&clock),
    });
    let host = host.unwrap();
    let builder = builder(32, 8, 2, "rounds=3");
    let (vm, vcpus, devices, lines) = boot(&builder, &host, clock, "verify");
    start(&vm, vcpus, &devices).wait();
    let ending = devices.ending();
    let Some(Ending::Failed(VcpuError::NoMemory { cause, .. })) = &ending else {
        panic!("{ending:?}\n{}", lines.text())
    };
    assert!(cause.contains("full"), "{cause}");
    vm.mmu().verify();
    host.verify();
}

#[test]
fn memory_that_does_not_compress_fills_the_compressed_device() {
    let swap = lacuna_soft::Swap::Memory;
    let builder = VmBuilder {
        swap,
        ..builder(64, 16, 2, "rounds=1 pattern=random")
    };
    let (outcome, _) = run(&builder, "verify");
    let Ending::Failed(error) = outcome.ending else {
        panic!("{:?}", outcome.ending)
    };
    assert!(
        error
            .to_string()
            .contains("swap device full: compressed memory"),
        "{error}"
    );
}

#[test]
fn too_small_a_budget_or_memory_is_refused_with_what_would_do() {
    let refused = |builder: VmBuilder| {
        let done = builder.run_to_summary(&image("hello"), |_: &str| ());
        done.map(|outcome| outcome.ending).unwrap_err().to_string()
    };
    let mut small = builder(32, 1, 4, "");
    small.resident = PageCount::new(16);
    let text = refused(small);
    assert!(text.contains("16") && text.contains("at least"), "{text}");
    let text = refused(builder(1, 64, 1, ""));
    assert!(text.contains("the guest needs at least"), "{text}");
    let mut nowhere = builder(32, 8, 1, "");
    nowhere.swap = lacuna_soft::Swap::File("/nonexistent/folder".into());
    let text = refused(nowhere);
    assert!(text.contains("/nonexistent/folder"), "{text}");
    for vcpus in [0, 257] {
        let text = format!("{vcpus} vCPUs: give 1 to 256");
        assert_eq!(refused(builder(32, 32, vcpus, "")), text);
    }
}

#[test]
fn guest_memory_is_huge_where_the_policy_hears_advice() {
    for (huge, pays) in [(HugePages::Never, false), (HugePages::Madvise, true)] {
        let builder = VmBuilder {
            huge,
            ..builder(32, 32, 1, "")
        };
        let (outcome, text) = run(&builder, "touch");
        assert!(matches!(outcome.ending, Ending::Exited(0)), "{text}");
        assert_eq!(outcome.host.huge_faults > 0, pays, "{:?}", outcome.host);
    }
}
