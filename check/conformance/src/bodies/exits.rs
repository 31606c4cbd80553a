//! A vCPU's exits, and their answers.

use std::time::Duration;

use iced_x86::code_asm::*;
use lacuna_machine::{Arch, Ending, Exit, ExitCounts, ExitKind, Vcpu as _, Vm, Width};

use super::Outcome;
use crate::backend::{Backend, Made, Request};
use crate::program::{Code, DEVICE, Reg, STACK, assemble, assemble_x86, image};
use crate::running::{run, within};

const TEXT: &[u8] = b"one, two\n";

fn small() -> Request {
    Request::new(4, 4, 1, "")
}

/// One string instruction prints a text, and another reads the line status. An absent device reads
/// as ones and ignores writes. The exit port takes the code.
pub fn string_ports_device_memory_and_the_exit_port<B: Backend>(backend: &B) -> Outcome {
    backend.has_string_ports()?;
    let code = assemble_x86(|a| {
        let mut text = a.create_label();
        a.mov(dx, 0x3f8)?;
        a.lea(rsi, ptr(text))?;
        a.mov(ecx, TEXT.len() as u32)?;
        a.rep().outsb()?;
        a.mov(dx, 0x3fd)?;
        a.mov(rdi, STACK)?;
        a.mov(ecx, 4)?;
        a.rep().insb()?;
        a.mov(eax, dword_ptr(rdi - 4))?;
        a.mov(rdi, DEVICE)?;
        a.add(eax, dword_ptr(rdi))?;
        a.mov(dword_ptr(rdi), eax)?;
        a.mov(dx, 0xf4)?;
        a.out(dx, eax)?;
        a.hlt()?;
        a.set_label(&mut text)?;
        a.db(TEXT)
    });
    let backend = backend.clone();
    within(move || {
        let finished = run(&backend, &small(), &image(&code))?;
        // The line status is 0x60, and one less is its sum with ones.
        let ending = finished.ending;
        assert!(matches!(ending, Ending::Exited(0x6060_605f)), "{ending:?}");
        assert_eq!(finished.printed, ["one, two"]);
        Ok(())
    })
}

/// Ports of each width: the serial line's registers answer bytes only, and an absent device reads
/// as ones.
pub fn ports_have_every_width<B: Backend>(backend: &B) -> Outcome {
    backend.x86_only("its processors have no ports")?;
    let code = assemble_x86(|a| {
        // 0x60, the line status.
        a.mov(dx, 0x3fd)?;
        a.xor(eax, eax)?;
        a.in_(al, dx)?;
        a.mov(ebx, eax)?;
        // 0xffff, and 0xffff_ffff, which is one less.
        a.xor(eax, eax)?;
        a.in_(ax, dx)?;
        a.add(ebx, eax)?;
        a.mov(dx, 0x100)?;
        a.in_(eax, dx)?;
        a.add(ebx, eax)?;
        a.out(dx, ax)?;
        a.mov(eax, ebx)?;
        a.mov(dx, 0xf4)?;
        a.out(dx, eax)?;
        a.hlt()
    });
    let backend = backend.clone();
    within(move || {
        let ending = run(&backend, &small(), &image(&code))?.ending;
        const SUM: u32 = 0x60 + 0xffff - 1;
        assert!(matches!(ending, Ending::Exited(SUM)), "{ending:?}");
        Ok(())
    })
}

/// The guest's last output is not lost, though its line is not finished.
pub fn an_unfinished_line_is_passed_on<B: Backend>(backend: &B) -> Outcome {
    let code = assemble(backend.arch(), |a| {
        a.set(Reg::A, u64::from(b'x'));
        a.print(Reg::A);
        a.exit(Reg::A);
    });
    let backend = backend.clone();
    within(move || {
        let finished = run(&backend, &small(), &image(&code))?;
        assert_eq!(finished.printed, ["x"]);
        assert!(matches!(finished.ending, Ending::Exited(_)));
        Ok(())
    })
}

/// The counted exits of the VM's only vCPU. All of them are of `kind`.
fn counted(vm: &impl Vm, kind: ExitKind) -> u64 {
    let counts: ExitCounts = vm.stats().vcpus[0].exits;
    assert_eq!(counts.of(kind), counts.total(), "{kind:?} in {counts:?}");
    counts.total()
}

/// Reads and writes of 1 to 8 bytes leave with their address, width and value, and a read gets the
/// answer of the VMM. Each is counted.
pub fn device_memory_has_every_width<B: Backend>(backend: &B) -> Outcome {
    // Each width, and the offsets to read and to write.
    const WIDTHS: [(Width, u32, u32); 4] = [
        (Width::Byte, 0, 1),
        (Width::Word, 2, 4),
        (Width::Long, 8, 12),
        (Width::Quad, 16, 24),
    ];
    let code = assemble(backend.arch(), |a| {
        a.set(Reg::A, DEVICE);
        for (width, from, to) in WIDTHS {
            a.load(width, Reg::B, Reg::A, from);
            a.store(width, Reg::A, to, Reg::B);
        }
        a.halt();
    });
    let backend = backend.clone();
    within(move || {
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        for (width, from, to) in WIDTHS {
            let (from, to) = (u64::from(from), u64::from(to));
            let value = 0x8877_6655_4433_2211 & width.ones();
            match vcpu.run().expect("a vCPU that can continue") {
                Exit::MmioRead { gpa, width: read } => {
                    assert_eq!((gpa.get(), read), (DEVICE + from, width));
                }
                other => panic!("{other:?} in place of a read of {width:?}"),
            }
            vcpu.complete_read(value);
            match vcpu.run().expect("a vCPU that can continue") {
                Exit::MmioWrite {
                    gpa,
                    width: written,
                    value: stored,
                } => {
                    let expected = (DEVICE + to, width, value);
                    assert_eq!((gpa.get(), written, stored & width.ones()), expected);
                }
                other => panic!("{other:?} in place of a write of {width:?}"),
            }
        }
        assert_eq!(counted(&*vm, ExitKind::Mmio), 2 * WIDTHS.len() as u64);
        Ok(())
    })
}

/// The code of a crashing guest: its exception handler raises exceptions for ever. On x86-64 that
/// is a triple fault.
fn crashes(arch: Arch) -> Code {
    assemble(arch, |a| a.crash())
}

/// A crash of the processor ends the run, and the text has the instruction's address.
pub fn a_crash_says_where<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let arch = backend.arch();
        let code = crashes(arch);
        let ending = format!("{:?}", run(&backend, &small(), &image(&code))?.ending);
        // If KVM runs guest kernels in its instruction emulator, it cannot emulate this fault.
        let expected = match arch {
            Arch::Arm64 => ["handler cannot be fetched"; 2],
            _ => ["triple fault", "KVM cannot continue"],
        };
        assert!(
            expected.iter().any(|what| ending.contains(what)),
            "{ending}"
        );
        let place = match arch {
            Arch::Arm64 => "pc 0x",
            _ => "rip 0x",
        };
        assert!(ending.contains(place), "{ending}");
        Ok(())
    })
}

/// A kick ends the run of a vCPU that has halted with interrupts off, each time.
pub fn a_kick_interrupts_a_halted_vcpu<B: Backend>(backend: &B) -> Outcome {
    use lacuna_machine::Kick as _;
    let code = assemble(backend.arch(), |a| {
        let again = a.here();
        a.halt();
        a.jump(again);
    });
    let backend = backend.clone();
    within(move || {
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        for _ in 0..3 {
            std::thread::scope(|scope| {
                let runner = scope.spawn(|| vcpu.run().expect("a vCPU that can continue"));
                while !runner.is_finished() {
                    std::thread::sleep(Duration::from_millis(1));
                    vm.kick_all();
                }
                let exit = runner.join().expect("no panic");
                assert_eq!(exit, Exit::Interrupted);
            });
        }
        assert_eq!(counted(&*vm, ExitKind::Interrupted), 3);
        Ok(())
    })
}
