//! The state in which a vCPU starts: CPUID, registers, control registers.

use super::msrs::{self, Fresh};
use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_RUNNABLE,
    kvm_cpuid_entry2, kvm_mp_state, kvm_regs, kvm_segment, kvm_sregs,
};
use kvm_ioctls::{Cap, Error, Kvm, VcpuFd};
use lacuna_machine::x86::cpuid::{Answer, Common, Leaf};
use lacuna_machine::{Apf, Boot, CpuModel, VmConfig, x86};

/// KVM's features, `KVM_CPUID_FEATURES`.
const FEATURES: u32 = 0x4000_0001;
/// The leaf of clock frequencies, as in QEMU and other VMMs: EAX = TSC kHz, EBX = APIC timer kHz.
const CLOCKS: u32 = 0x4000_0010;
/// KVM's local APIC counts nanoseconds.
const APIC_KHZ: u32 = 1_000_000;
const SIGNATURE: u32 = 0x4000_0000;
/// The leaves of the common model that depend on ECX.
const STRUCTURED: u32 = 7;
const TOPOLOGY: u32 = 0xb;

/// `KVM_FEATURE_ASYNC_PF` and `KVM_FEATURE_ASYNC_PF_INT`; neither is useful alone.
pub const APF_BITS: u32 = 1 << 4 | 1 << 14;
/// `KVM_FEATURE_ASYNC_PF_VMEXIT`, useful only to nested hypervisors.
const APF_VMEXIT: u32 = 1 << 10;

/// Leaf 1 ECX.
const X2APIC: u32 = 1 << 21;
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// The leaf of CPUID with the sizes of addresses.
const SIZES: u32 = 0x8000_0008;

/// The features of the guest's processors. Only the processors' numbers differ.
pub struct Features {
    supported: CpuId,
    tsc_deadline: bool,
    tsc_scales: Scaling,
    apf: Apf,
    model: CpuModel,
    vcpus: u32,
    /// The registers that KVM saves and restores.
    msrs: Vec<u32>,
}

/// Whether a guest's TSC may run at another rate than the host's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scaling {
    Yes,
    No,
}

impl Features {
    /// Reads the features that this host's KVM offers for `config`.
    pub fn of(kvm: &Kvm, config: &VmConfig) -> Result<Self, Error> {
        Ok(Self {
            supported: kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?,
            tsc_deadline: kvm.check_extension(Cap::TscDeadlineTimer),
            tsc_scales: match kvm.check_extension(Cap::TscControl) {
                true => Scaling::Yes,
                false => Scaling::No,
            },
            apf: config.apf,
            model: config.cpu,
            vcpus: config.vcpus as u32,
            msrs: kvm.get_msr_index_list()?.as_slice().to_vec(),
        })
    }

    /// Whether KVM offers asynchronous page faults.
    pub fn has_apf(&self) -> bool {
        let leaf = self.supported.as_slice().iter();
        let features = leaf.filter(|e| e.function == FEATURES).map(|e| e.eax);
        features.fold(0, |all, eax| all | eax) & APF_BITS == APF_BITS
    }

    /// The number of bits of a physical address on this host. KVM with two-dimensional paging
    /// refuses slots above.
    pub fn address_bits(&self) -> u32 {
        let [eax, ..] = answer(self.supported.as_slice(), SIZES, 0);
        // A processor without the leaf has 36.
        (eax & 0xff).max(36)
    }

    /// The features announced in KVM's own leaf of CPUID.
    pub fn kvm_features(&self) -> u32 {
        let [eax, ..] = answer(&self.entries(0, 0), FEATURES, 0);
        eax
    }

    /// The values of a new vCPU's model-specific registers.
    pub fn fresh(&self, vcpu: &VcpuFd) -> Fresh {
        msrs::fresh(vcpu, &self.msrs)
    }

    /// A feature of the processor model that KVM lacks.
    pub fn missing(&self) -> Option<&'static str> {
        match self.model {
            CpuModel::Host => None,
            CpuModel::Common { .. } => {
                let entries = self.host_entries(0);
                Common::missing_in(self.apf, |function, index| {
                    answer(&entries, function, index)
                })
            }
        }
    }

    /// Which processor the guest sees.
    pub fn model(&self) -> CpuModel {
        self.model
    }

    /// The features announced to the guest by CPUID.
    pub fn announced(&self) -> x86::cpuid::Features {
        let entries = self.entries(0, 0);
        x86::cpuid::Features::of(|function, index| answer(&entries, function, index))
    }

    /// Makes the TSC of vCPU `index` run at `khz`, and its CPUID announce that. `false` if KVM
    /// cannot.
    pub fn set_tsc(&self, vcpu: &VcpuFd, index: usize, khz: u32) -> Result<bool, Error> {
        let own = vcpu.get_tsc_khz()?;
        if khz == own {
            return Ok(true);
        }
        let set = set_tsc_khz(vcpu, khz, self.tsc_scales)?;
        if set && self.set_cpuid(vcpu, index).is_err() {
            // The error means that the vCPU has run, so its guest uses the old frequency.
            let _ = vcpu.set_tsc_khz(own);
            return Ok(false);
        }
        Ok(set)
    }

    /// Sets the CPUID of vCPU `index`, with the present frequency of its TSC. KVM refuses the call
    /// after the vCPU has run.
    pub fn set_cpuid(&self, vcpu: &VcpuFd, index: usize) -> Result<(), Error> {
        let entries = self.entries(index as u32, vcpu.get_tsc_khz()?);
        let cpuid = CpuId::from_entries(&entries).map_err(|_| Error::new(libc::E2BIG))?;
        vcpu.set_cpuid2(&cpuid)
    }

    /// CPUID of vCPU `index`, whose APIC id is the same.
    fn entries(&self, index: u32, tsc_khz: u32) -> Vec<kvm_cpuid_entry2> {
        if let CpuModel::Common { .. } = self.model {
            let common = Common {
                index,
                vcpus: self.vcpus,
                tsc_khz,
                apf: self.apf,
            };
            return common.leaves().iter().map(entry).collect();
        }
        let mut entries = self.host_entries(index);
        entries.push(kvm_cpuid_entry2 {
            function: CLOCKS,
            eax: tsc_khz,
            ebx: APIC_KHZ,
            ..Default::default()
        });
        entries
    }

    /// All leaves of KVM, without the leaf of clock frequencies.
    fn host_entries(&self, index: u32) -> Vec<kvm_cpuid_entry2> {
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
        entries
    }

    /// Sets the first state of a new vCPU: its CPUID and, with `boot`, the guest's entry point.
    pub fn start(&self, vcpu: &VcpuFd, index: usize, boot: Option<&Boot>) -> Result<(), Error> {
        self.set_cpuid(vcpu, index)?;
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
        // All vCPUs start at once. By default, KVM makes all but the first wait for an INIT.
        vcpu.set_mp_state(kvm_mp_state {
            mp_state: KVM_MP_STATE_RUNNABLE,
        })
    }
}

fn entry(leaf: &Leaf) -> kvm_cpuid_entry2 {
    let [eax, ebx, ecx, edx] = leaf.answer;
    kvm_cpuid_entry2 {
        function: leaf.function,
        index: leaf.index,
        flags: match leaf.function {
            STRUCTURED | TOPOLOGY => KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            _ => 0,
        },
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    }
}

fn answer(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> Answer {
    let is_it = |e: &&kvm_cpuid_entry2| {
        let looks = e.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX != 0;
        e.function == function && (!looks || e.index == index)
    };
    let found = entries.iter().find(is_it);
    found.map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
}

/// Makes the TSC of `vcpu` run at `khz`. `false` if KVM cannot.
///
/// Without scaling, KVM accepts a higher frequency and advances the TSC at each exit, so a guest
/// sees jumps. This function refuses such a frequency. KVM stores a frequency before it refuses it,
/// so this function sets the old one again.
fn set_tsc_khz(vcpu: &VcpuFd, khz: u32, scaling: Scaling) -> Result<bool, Error> {
    let own = vcpu.get_tsc_khz()?;
    if khz == own {
        return Ok(true);
    }
    let set = scaling == Scaling::Yes && khz != 0 && vcpu.set_tsc_khz(khz).is_ok();
    if !set {
        let _ = vcpu.set_tsc_khz(own);
    }
    Ok(set)
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
    // The guest loads its own TR before its first use, but the processor always requires a valid
    // TR.
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
