//! SYS: TLBI, IC, DC and AT (Arm ARM C5.1.3, D8.13, D8.9).
//!
//! Caches are coherent here, so cache maintenance changes nothing. Maintenance by address still
//! translates the address, and faults as a load does.

use super::{Done, Flush, x};
use crate::mem::View;
use crate::processor::Core;
use crate::shootdown::Invalidation;
use crate::state::{Exception, Trap};
use crate::sysreg::{Encoding, sctlr};
use crate::walk::{Found, Purpose, Request, fault, walk};
use lacuna_addr::Access;
use lacuna_cpu::{Bus, Privilege, Space};

/// ISS of a data abort by cache maintenance or by AT: CM, and always WnR.
const CM: u32 = 1 << 8 | 1 << 6;

/// Whether an invalidation reaches the other vCPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reach {
    Local,
    Shareable,
}

/// Executes the SYS instruction `word`.
pub(super) fn execute<B: Bus>(view: &mut View<'_, B>, word: u32) -> Result<Done, Trap> {
    let encoding = Encoding::of(word);
    let value = x(view.core, word);
    match (
        encoding.op1(),
        encoding.crn(),
        encoding.crm(),
        encoding.op2(),
    ) {
        // IC IVAU, DC CVAC, DC CVAU, DC CIVAC: for EL0 too.
        (3, 7, 5 | 10 | 11 | 14, 1) => {
            if view.core.user == Privilege::User && view.core.sys.sctlr & sctlr::UCI == 0 {
                return Err(Exception::system_trap(word).into());
            }
            by_address(view, value, Access::Read)
        }
        _ if view.core.user == Privilege::User => Err(Exception::UNDEFINED.into()),
        // DC IVAC, which needs the right to write.
        (0, 7, 6, 1) => by_address(view, value, Access::Write),
        // IC IALLUIS, IC IALLU, DC ISW, DC CSW, DC CISW.
        (0, 7, 1 | 5, 0) | (0, 7, 6 | 10 | 14, 2) => Ok(Done::Next),
        (0, 7, 8, op2 @ 0..=3) => translate(view, value, op2),
        (0, 8, 3, op2) => invalidate(view.core, Reach::Shareable, op2, value),
        (0, 8, 7, op2) => invalidate(view.core, Reach::Local, op2, value),
        _ => Err(Exception::UNDEFINED.into()),
    }
}

/// Cache maintenance by address.
fn by_address<B: Bus>(view: &mut View<'_, B>, va: u64, access: Access) -> Result<Done, Trap> {
    match probe(view, va, access, view.core.user) {
        Ok(_) => Ok(Done::Next),
        Err(Trap::Exception(exception)) => Err(marked(exception)),
        Err(trap) => Err(trap),
    }
}

/// The abort `exception` in the form of cache maintenance and AT.
fn marked(exception: Exception) -> Trap {
    Trap::Exception(Exception {
        iss: exception.iss | CM,
        ..exception
    })
}

fn probe<B: Bus>(
    view: &mut View<'_, B>,
    va: u64,
    access: Access,
    user: Privilege,
) -> Result<Found, Trap> {
    let request = Request {
        va,
        access,
        user,
        purpose: Purpose::Probe,
    };
    let core = &mut *view.core;
    walk(&core.sys, &mut core.translations.walk, view.bus, request)
}

/// AT S1E1R, S1E1W, S1E0R, S1E0W: the result goes to PAR_EL1 (D17.2.105).
fn translate<B: Bus>(view: &mut View<'_, B>, va: u64, op2: u16) -> Result<Done, Trap> {
    let access = match op2 & 1 {
        0 => Access::Read,
        _ => Access::Write,
    };
    let user = match op2 & 2 {
        0 => Privilege::Supervisor,
        _ => Privilege::User,
    };
    const RES1: u64 = 1 << 11;
    let par = match probe(view, va, access, user) {
        Ok(found) => RES1 | success(view.core, found),
        Err(Trap::Exception(exception)) => {
            let code = exception.iss & 0x3f;
            if code & !3 == fault::EXTERNAL_ON_WALK {
                // The walk failed outside of the tables: an exception, and no result.
                return Err(marked(exception));
            }
            RES1 | u64::from(code) << 1 | 1
        }
        Err(trap) => return Err(trap),
    };
    view.core.sys.par = par;
    Ok(Done::Next)
}

/// PAR_EL1 of a translation: the frame, the memory type, the shareability.
fn success(core: &Core, found: Found) -> u64 {
    let memory_type = match core.sys.sctlr & sctlr::M {
        0 => 0,
        _ => core.sys.mair >> (8 * found.attributes) & 0xff,
    };
    // Device memory is always outer shareable.
    let shareability = match memory_type & 0xf0 {
        0 => 2,
        _ => u64::from(found.shareability),
    };
    found.mapping.gfn.gpa().get() | memory_type << 56 | shareability << 7
}

/// TLBI of EL1 (C5.5). An operand has the address's bits 55 to 12 in bits 43 to 0, and an ASID in
/// bits 63 to 48. The invalidation of an address in one address space drops it in all of them: this
/// is allowed.
fn invalidate(core: &Core, reach: Reach, op2: u16, value: u64) -> Result<Done, Trap> {
    let va = ((value << 20) as i64 >> 8) as u64;
    let (flush, everywhere) = match op2 {
        // VMALLE1.
        0 => (Flush::All, Invalidation::All),
        // VAE1, VAAE1, VALE1, VAALE1.
        1 | 3 | 5 | 7 => (Flush::Address(va), Invalidation::Address(va)),
        // ASIDE1.
        2 => {
            let space = Space(core.sys.asid(value));
            (Flush::Forget(space), Invalidation::Space(space))
        }
        _ => return Err(Exception::UNDEFINED.into()),
    };
    if reach == Reach::Shareable {
        let index = core.interface.index();
        core.fabric.shootdown.send(index, everywhere);
    }
    Ok(Done::Flush(flush))
}
