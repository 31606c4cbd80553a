//! Calls in an order or with arguments that a careful VMM avoids. Each does nothing, or is refused
//! with an error that says what to do. The guest misses nothing, and no call panics or hangs.

use iced_x86::code_asm::*;
use lacuna_addr::Gpa;
use lacuna_machine::{
    Apf, BackendError as _, ErrorKind, Exit, GuestMemory as _, Image, Kick as _, MemorySlots as _,
    SaveRestore as _, Segment, StateError, Vcpu as _, VcpuState, Vm as _, Width, arm64, x86,
};

use super::Outcome;
use super::missing::Words;
use super::state::{Damage, assert_same, counter, damaged, small};
use crate::backend::{
    Backend, Built, Made, Missing, Origin, Request, VcpuOf, harvest, start_tracking,
};
use crate::program::{
    ASK_PORT, DEVICE, REPORT_PORT, Reg, STACK, assemble, assemble_x86, async_faults_at, code,
    image, is_question, ram, reported, saved,
};
use crate::running::within;

fn next<B: Backend>(vcpu: &mut VcpuOf<B>) -> Exit {
    vcpu.run().expect("a vCPU that can continue")
}

fn next_told<B: Backend>(vcpu: &mut VcpuOf<B>) -> u32 {
    let exit = next::<B>(vcpu);
    reported(&exit).unwrap_or_else(|| panic!("{exit:?}"))
}

/// An answer without a question is no answer to a later question, and takes no write from a device.
pub fn an_answer_without_a_question_is_ignored<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = assemble(backend.arch(), |a| {
            a.set(Reg::A, DEVICE);
            a.ask(Reg::B);
            a.report(Reg::B);
            a.store(Width::Long, Reg::A, 0, Reg::B);
            a.load(Width::Long, Reg::B, Reg::A, 0);
            a.report(Reg::B);
            a.halt();
        });
        let Made { mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        vcpu.complete_read(1);
        let exit = next::<B>(vcpu);
        assert!(is_question(&exit), "{exit:?}");
        vcpu.complete_read(42);
        vcpu.complete_read(43);
        assert_eq!(next_told::<B>(vcpu), 42);
        vcpu.complete_read(44);
        let exit = next::<B>(vcpu);
        let is_write = matches!(exit, Exit::MmioWrite { value, .. } if value as u32 == 42);
        assert!(is_write, "{exit:?}");
        vcpu.complete_read(45);
        for _ in 0..2 {
            let exit = next::<B>(vcpu);
            assert!(matches!(exit, Exit::MmioRead { .. }), "{exit:?}");
        }
        vcpu.complete_read(46);
        assert_eq!(next_told::<B>(vcpu), 46);
        Ok(())
    })
}

/// Each access of a string instruction is reported and answered once, whatever the VMM answers in
/// between.
pub fn a_string_of_ports_keeps_each_access<B: Backend>(backend: &B) -> Outcome {
    backend.has_string_ports()?;
    let backend = backend.clone();
    within(move || {
        let code = assemble_x86(|a| {
            let mut text = a.create_label();
            a.mov(dx, i32::from(REPORT_PORT))?;
            a.lea(rsi, ptr(text))?;
            a.mov(ecx, 5)?;
            a.rep().outsb()?;
            a.mov(dx, i32::from(ASK_PORT))?;
            a.mov(rdi, STACK)?;
            a.mov(ecx, 4)?;
            a.rep().insb()?;
            a.mov(eax, dword_ptr(rdi - 4))?;
            a.out(i32::from(REPORT_PORT), eax)?;
            a.hlt()?;
            a.set_label(&mut text)?;
            a.db(b"abcde")
        });
        let Made { mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        for letter in *b"abcde" {
            assert_eq!(next_told::<B>(vcpu), u32::from(letter));
            vcpu.complete_read(7);
        }
        for value in 1..=4 {
            let exit = next::<B>(vcpu);
            assert!(matches!(exit, Exit::IoIn { .. }), "{exit:?}");
            vcpu.complete_read(value);
            vcpu.complete_read(9);
        }
        assert_eq!(next_told::<B>(vcpu), 0x0403_0201);
        Ok(())
    })
}

/// A device access across two pages exits once for each of its bytes, in pieces of 1, 2, 4 or 8.
pub fn a_device_access_across_pages_has_each_byte_once<B: Backend>(backend: &B) -> Outcome {
    const VALUE: u64 = 0x8877_6655_4433_2211;
    let backend = backend.clone();
    within(move || {
        for before in 1..8 {
            let at = DEVICE + 0x1000 - before;
            let code = assemble(backend.arch(), |a| {
                a.allow_unaligned();
                a.set(Reg::A, at);
                a.set(Reg::B, VALUE);
                a.store(Width::Quad, Reg::A, 0, Reg::B);
                a.load(Width::Quad, Reg::B, Reg::A, 0);
                a.report(Reg::B);
                a.shift_right(Reg::B, 32);
                a.report(Reg::B);
                a.halt();
            });
            let Made { mut vcpus, .. } = backend.make(&small(), &image(&code))?;
            let vcpu = &mut vcpus[0];
            let mut written = Vec::new();
            let mut read = Vec::new();
            let low = loop {
                let exit = next::<B>(vcpu);
                if let Some(value) = reported(&exit) {
                    break value;
                }
                match exit {
                    Exit::MmioWrite { gpa, width, value } => {
                        let bytes = &value.to_le_bytes()[..width as usize];
                        written.extend((gpa.get()..).zip(bytes.iter().copied()));
                    }
                    Exit::MmioRead { gpa, width } => {
                        let bytes = gpa.get()..gpa.get() + width as u64;
                        let low = |at: u64| at & 0xff;
                        let value = bytes.clone().rev().fold(0, |all, at| all << 8 | low(at));
                        read.extend(bytes);
                        vcpu.complete_read(value);
                    }
                    exit => panic!("{exit:?}"),
                }
            };
            let bytes: Vec<_> = (at..).zip(VALUE.to_le_bytes()).collect();
            assert_eq!(written, bytes, "{before} bytes before the end of a page");
            assert_eq!(read, (at..at + 8).collect::<Vec<_>>(), "{before}");
            let value = u64::from(next_told::<B>(vcpu)) << 32 | u64::from(low);
            let answers = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| (at + i) as u8);
            assert_eq!(value.to_le_bytes(), answers, "{before}");
        }
        Ok(())
    })
}

/// A restore while an instruction waits for its answer is refused, or replaces the vCPU's whole
/// state.
pub fn a_restore_over_half_an_instruction_is_whole<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = assemble(backend.arch(), |a| {
            a.set(Reg::A, DEVICE);
            a.set(Reg::B, 5);
            a.report(Reg::B);
            a.load(Width::Long, Reg::C, Reg::A, 0);
            a.add(Reg::B, Reg::C);
            a.report(Reg::B);
            a.ask(Reg::B);
            a.halt();
        });
        for leaves in 1..=3 {
            let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
            let vcpu = &mut vcpus[0];
            next_told::<B>(vcpu);
            vm.kick(0);
            assert_eq!(next::<B>(vcpu), Exit::Interrupted);
            let state = vcpu.save().expect("between two instructions");
            for _ in 0..leaves {
                vcpu.complete_read(100);
                next::<B>(vcpu);
            }
            match vcpu.restore(&state) {
                Ok(()) => {}
                Err(StateError::MidInstruction { vcpu: 0 }) => {
                    vcpu.complete_read(200);
                    vm.kick(0);
                    while next::<B>(vcpu) != Exit::Interrupted {}
                    vcpu.restore(&state).expect("between two instructions");
                }
                Err(error) => panic!("{error}"),
            }
            let exit = next::<B>(vcpu);
            assert!(matches!(exit, Exit::MmioRead { .. }), "{leaves}: {exit:?}");
            vcpu.complete_read(1);
            assert_eq!(next_told::<B>(vcpu), 6, "{leaves}");
        }
        Ok(())
    })
}

/// An image that does not fit changes nothing: another one may follow. A VMM may fill in any sizes
/// and addresses.
pub fn an_image_that_is_refused_may_be_followed_by_another<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let Built { vm, .. } = backend.build(&small())?;
        let bytes = [0; 5000];
        let arch = backend.arch();
        let halts = assemble(arch, |a| a.halt());
        let segment = |at, size| Segment {
            gpa: Gpa::truncate(at),
            bytes: &bytes,
            size,
        };
        for bad in [
            segment(ram(arch, 0x20_0000), u64::MAX),
            segment(ram(arch, 0x20_0000), u64::MAX - 0x1f_ffff),
            segment(u64::MAX, 8),
            segment(ram(arch, (16 << 20) - 4096), 10),
            segment(ram(arch, 0), 8),
        ] {
            let good = image(&halts);
            let bad = Image {
                segments: [good.segments, vec![bad]].concat(),
                ..good
            };
            let refused = vm.boot(&bad, "").err().expect("it does not fit");
            assert_eq!(refused.kind(), ErrorKind::Request, "{refused}");
        }
        let long = "x".repeat(4096);
        let refused = vm.boot(&image(&halts), &long).err();
        assert!(refused.is_some(), "a command line that is too long");
        let mut byte = [1];
        vm.read(code(arch), &mut byte).expect("guest memory");
        assert_eq!(byte, [0], "nothing was written");
        assert_eq!(vm.boot(&image(&halts), "").expect("it fits").len(), 1);
        let again = vm.boot(&image(&halts), "").err().expect("once");
        assert_eq!(again.kind(), ErrorKind::Request, "{again}");
        assert!(vm.bare_vcpus().is_err());
        Ok(())
    })
}

/// Kicks of stopped, future and dropped vCPUs.
pub fn kicks_at_any_time<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let Built { vm, .. } = backend.build(&small())?;
        vm.kick(usize::MAX);
        vm.kick(0);
        vm.kick_all();
        let mut vcpus = vm.bare_vcpus().expect("its first vCPUs");
        assert_eq!(next::<B>(&mut vcpus[0]), Exit::Interrupted);
        start_tracking(&*vm);
        drop(vcpus);
        vm.kick_all();
        harvest(&*vm);
        vm.remove_slot(vm.memory_slots()[0].id)
            .expect("it is there");
        Ok(())
    })
}

/// vCPUs outlive the last other use of their VM, in the middle of an instruction too.
pub fn a_vm_lives_as_long_as_its_vcpus<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let arch = backend.arch();
        let code = assemble(arch, |a| {
            a.set(Reg::A, ram(arch, STACK - 8));
            a.store(Width::Quad, Reg::A, 0, Reg::A);
            a.ask(Reg::B);
            a.report(Reg::B);
            a.halt();
        });
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        drop(vm);
        let exit = next::<B>(&mut vcpus[0]);
        assert!(is_question(&exit), "{exit:?}");
        vcpus[0].complete_read(3);
        assert_eq!(next_told::<B>(&mut vcpus[0]), 3);
        Ok(())
    })
}

/// Places of areas of async page faults: offsets in memory, then addresses.
const AREAS: [u64; 6] = [
    0,
    (16 << 20) - 64,
    16 << 20,
    DEVICE,
    0xfee0_0000,
    0x0800_0000,
];
/// Values that no guest should give.
const VALUES: [u64; 8] = [
    1,
    (1 << 47) + 0xb,
    (1 << 48) + 0xb,
    u64::MAX,
    !0x34,
    1 << 63 | 0xb,
    3 << 62,
    0x3b,
];

/// Asynchronous page faults are enabled at addresses of every kind. A forbidden value raises an
/// exception in the guest, and ends nothing but the guest.
pub fn async_faults_are_enabled_anywhere<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request {
            apf: Apf::On,
            ..small()
        };
        // With a source of pages, a backend may have another host side for them.
        fn words() -> Option<Origin> {
            let (source, missing) = (Words::at_once(), Missing::Waits);
            Some(Origin { source, missing })
        }
        let origins: [fn() -> Option<Origin>; 2] = [|| None, words];
        let arch = backend.arch();
        let areas = AREAS.map(|area| match area < 1 << 25 {
            true => async_faults_at(arch, ram(arch, area)),
            false => async_faults_at(arch, area),
        });
        let values = || areas.iter().chain(&VALUES).copied();
        for (origin, value) in origins.iter().flat_map(|o| values().map(move |v| (o, v))) {
            let request = Request {
                origin: origin(),
                ..request.clone()
            };
            let code = assemble(arch, |a| {
                a.enable_async_faults(value);
                a.report(Reg::A);
                a.halt();
            });
            let Made { vm, mut vcpus, .. } = backend.make(&request, &image(&code))?;
            // A KVM that emulates guest kernels cannot emulate a triple fault.
            let Ok(exit) = vcpus[0].run() else { continue };
            let is_reported = reported(&exit).is_some();
            let known = is_reported || matches!(exit, Exit::Shutdown(_));
            assert!(known, "{value:#x}: {exit:?}");
            if is_reported {
                vm.kick(0);
                assert_eq!(next::<B>(&mut vcpus[0]), Exit::Interrupted);
                let state = vcpus[0].save().expect("between two instructions");
                vcpus[0].restore(&state).expect("its own state");
                vm.remove_slot(vm.memory_slots()[0].id)
                    .expect("it is there");
                let refused = vcpus[0].restore(&state);
                let named = refused.map_err(|error| error.to_string());
                assert!(
                    !matches!(&named, Err(text) if !text.contains("apf") && !text.contains("MSR")),
                    "{named:?}"
                );
            }
        }
        Ok(())
    })
}

/// Values of x86-64 states that some hypervisors refuse when they get them.
const X86_LATE: [Damage<x86::State>; 4] = [
    (&["xsave"], |s| s.xsave = Some(vec![0; 3])),
    (&["lstar"], |s| _ = s.msrs.insert(0xc000_0082, 1 << 62)),
    (&["pat"], |s| _ = s.msrs.insert(0x277, 2)),
    (&["apf"], |s| s.apf.enable = u64::MAX),
];

const VBAR: arm64::SysReg = arm64::SysReg::new([3, 0, 12, 0, 0]);
const TTBR0: arm64::SysReg = arm64::SysReg::new([3, 0, 2, 0, 0]);

/// The same of AArch64 states.
const ARM64_LATE: [Damage<arm64::State>; 5] = [
    (&["vbar"], |s| _ = s.system.insert(VBAR, 1)),
    (&["ttbr0"], |s| _ = s.system.insert(TTBR0, u64::MAX)),
    (&["pmr"], |s| s.gic.cpu.pmr = 0xff),
    (&["apf"], |s| {
        s.apf.enabled = Some((arm64::Form::Sdei, u64::MAX))
    }),
    (&["sdei"], |s| {
        s.apf.sdei.handler = Some(arm64::Handler {
            entry: 1,
            argument: u64::MAX,
            enabled: true,
        })
    }),
];

/// If only the hypervisor below can judge a state's value, it refuses the state by name, and the
/// vCPU continues unchanged.
pub fn a_state_that_is_refused_late_changes_nothing<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = counter(backend.arch());
        let request = Request::new(16, 16, 1, "");
        let Made { vm, mut vcpus, .. } = backend.make(&request, &image(&code))?;
        let vcpu = &mut vcpus[0];
        assert_eq!(next_told::<B>(vcpu), 1);
        vm.kick(0);
        assert_eq!(next::<B>(vcpu), Exit::Interrupted);
        let state = vcpu.save().expect("between two instructions");
        let late = match &state {
            VcpuState::X86(state) => damaged(&**state, &X86_LATE, VcpuState::X86),
            VcpuState::Arm64(state) => damaged(&**state, &ARM64_LATE, VcpuState::Arm64),
            other => panic!("{other:?}"),
        };
        for (what, mut damaged) in late {
            *saved(&mut damaged, Reg::A) = 1000;
            let Err(refused) = vcpu.restore(&damaged) else {
                // This hypervisor has no rule for the value.
                vcpu.restore(&state).expect("its own state");
                continue;
            };
            let now = vcpu.save().expect("between two instructions");
            assert_same(&now, &state, &format!("{what:?}: {refused}"));
        }
        assert_eq!(next_told::<B>(vcpu), 2);
        Ok(())
    })
}
