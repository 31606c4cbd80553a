//! The state in which a vCPU starts: CPUID, registers, control registers.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_RUNNABLE, kvm_cpuid_entry2, kvm_mp_state, kvm_regs,
    kvm_segment, kvm_sregs,
};
use kvm_ioctls::{Cap, Error, Kvm, VcpuFd};
use lacuna_machine::{Apf, Boot, CpuModel, VmConfig};

/// KVM's features, `KVM_CPUID_FEATURES`.
const FEATURES: u32 = 0x4000_0001;
/// The leaf of clock frequencies, as in QEMU and other VMMs: EAX = TSC kHz, EBX = APIC timer kHz.
const CLOCKS: u32 = 0x4000_0010;
/// KVM's local APIC counts nanoseconds.
const APIC_KHZ: u32 = 1_000_000;
const SIGNATURE: u32 = 0x4000_0000;

/// `KVM_FEATURE_ASYNC_PF` and `KVM_FEATURE_ASYNC_PF_INT`; neither is useful alone.
pub const APF_BITS: u32 = 1 << 4 | 1 << 14;
/// `KVM_FEATURE_ASYNC_PF_VMEXIT`, useful only to nested hypervisors.
const APF_VMEXIT: u32 = 1 << 10;

/// Leaf 1 ECX.
const X2APIC: u32 = 1 << 21;
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;

/// The features of the guest's processors, the same for all except their numbers.
pub struct Features {
    supported: CpuId,
    tsc_deadline: bool,
    apf: Apf,
    model: CpuModel,
    msrs: Vec<u32>,
}

impl Features {
    /// What this host's KVM can do.
    pub fn of(kvm: &Kvm, config: &VmConfig) -> Result<Self, Error> {
        Ok(Self {
            supported: kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?,
            tsc_deadline: kvm.check_extension(Cap::TscDeadlineTimer),
            apf: config.apf,
            model: config.cpu,
            msrs: kvm.get_msr_index_list()?.as_slice().to_vec(),
        })
    }

    /// Whether KVM can tell a guest about pages on their way.
    pub fn has_apf(&self) -> bool {
        let leaf = self.supported.as_slice().iter();
        let features = leaf.filter(|e| e.function == FEATURES).map(|e| e.eax);
        features.fold(0, |all, eax| all | eax) & APF_BITS == APF_BITS
    }

    /// Model-specific registers that KVM saves and restores.
    pub fn msrs(&self) -> &[u32] {
        &self.msrs
    }

    /// CPUID of vCPU `index`, whose APIC id is the same.
    fn cpuid(&self, index: u32, tsc_khz: u32) -> Result<CpuId, Error> {
        let mut entries = self.supported.as_slice().to_vec();
        entries.retain(|e| e.function != CLOCKS);
        for e in &mut entries {
            match e.function {
                1 => {
                    e.ebx = e.ebx & 0x00ff_ffff | index << 24;
                    e.ecx |= X2APIC | HYPERVISOR;
                    if self.tsc_deadline {
                        e.ecx |= TSC_DEADLINE;
                    }
                }
                0xb | 0x1f => e.edx = index,
                SIGNATURE => e.eax = e.eax.max(CLOCKS),
                FEATURES if self.apf == Apf::Off => e.eax &= !(APF_BITS | APF_VMEXIT),
                _ => {}
            }
        }
        if let CpuModel::Common { .. } = self.model {
            entries.iter_mut().for_each(common);
        }
        entries.push(kvm_cpuid_entry2 {
            function: CLOCKS,
            eax: tsc_khz,
            ebx: APIC_KHZ,
            ..Default::default()
        });
        CpuId::from_entries(&entries).map_err(|_| Error::new(libc::E2BIG))
    }

    /// Puts a fresh vCPU at the guest's entry point.
    pub fn start(&self, vcpu: &VcpuFd, index: usize, boot: Option<&Boot>) -> Result<(), Error> {
        if let CpuModel::Common { tsc_khz: Some(khz) } = self.model
            && khz != vcpu.get_tsc_khz()?
        {
            vcpu.set_tsc_khz(khz)?;
        }
        let tsc_khz = vcpu.get_tsc_khz()?;
        vcpu.set_cpuid2(&self.cpuid(index as u32, tsc_khz)?)?;
        let Some(boot) = boot else {
            return Ok(());
        };
        let mut sregs = vcpu.get_sregs()?;
        long_mode(&mut sregs, boot);
        vcpu.set_sregs(&sregs)?;
        vcpu.set_regs(&kvm_regs {
            rip: boot.entry.get(),
            rbx: boot.start_info.get(),
            rsi: boot.start_info.get(),
            rflags: 2,
            ..Default::default()
        })?;
        // All vCPUs start at once; by default KVM lets all but the first wait for an INIT.
        vcpu.set_mp_state(kvm_mp_state {
            mp_state: KVM_MP_STATE_RUNNABLE,
        })
    }
}

/// Hides what not every backend has: FPU, vectors, and most extensions. The features that remain
/// are those of the soft backend's processor.
fn common(e: &mut kvm_cpuid_entry2) {
    const PCID: u32 = 1 << 17;
    const POPCNT: u32 = 1 << 23;
    match (e.function, e.index) {
        (1, _) => {
            e.ecx &= PCID | X2APIC | POPCNT | TSC_DEADLINE | HYPERVISOR;
            // DE PSE TSC MSR PAE CX8 APIC PGE CMOV PAT CLFSH HTT
            e.edx &= 0b11_1100 | 1 << 6 | 0b11 << 8 | 1 << 13 | 0b11 << 15 | 1 << 19 | 1 << 28;
        }
        (7, 0) => {
            const SMEP: u32 = 1 << 7;
            (e.eax, e.ebx, e.ecx, e.edx) = (0, e.ebx & SMEP, 0, 0);
        }
        (6 | 7 | 0xa | 0xd | 0x10 | 0x12 | 0x14, _) => {
            (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, 0);
        }
        (FEATURES, _) => e.eax &= 1 << 1 | APF_BITS,
        (0x8000_0001, _) => {
            e.ecx &= 1 << 0 | 1 << 5;
            // SYSCALL NX, 1 GiB pages, RDTSCP, long mode
            e.edx &= 1 << 11 | 1 << 20 | 1 << 26 | 1 << 27 | 1 << 29;
        }
        _ => {}
    }
}

/// As [`Boot`] says: 64-bit code at CPL 0, flat segments, the identity map.
fn long_mode(sregs: &mut kvm_sregs, boot: &Boot) {
    const PE_ET_NE_PG: u64 = 1 | 1 << 4 | 1 << 5 | 1 << 31;
    const PAE: u64 = 1 << 5;
    const LME_LMA: u64 = 1 << 8 | 1 << 10;
    const CODE: u8 = 11;
    const DATA: u8 = 3;
    const BUSY_TSS: u8 = 11;
    let flat = |selector, type_, l| kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        s: 1,
        l,
        db: 1 - l,
        g: 1,
        ..Default::default()
    };
    let data = flat(boot.data_selector, DATA, 0);
    sregs.cs = flat(boot.code_selector, CODE, 1);
    for segment in [
        &mut sregs.ds,
        &mut sregs.es,
        &mut sregs.fs,
        &mut sregs.gs,
        &mut sregs.ss,
    ] {
        *segment = data;
    }
    // Never read before the guest loads its own, but hardware requires one.
    sregs.tr = kvm_segment {
        limit: 0x67,
        type_: BUSY_TSS,
        present: 1,
        ..Default::default()
    };
    sregs.gdt.base = boot.gdt.get();
    sregs.gdt.limit = boot.gdt_limit;
    sregs.cr0 = PE_ET_NE_PG;
    sregs.cr3 = boot.page_table.get();
    sregs.cr4 = PAE;
    sregs.efer = LME_LMA;
}
