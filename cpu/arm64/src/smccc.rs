//! Calls of a guest to its hypervisor by HVC (SMC Calling Convention, Arm DEN 0028).
//!
//! ```text
//! X0  31     30      29..24  23..16  15..0       X1..X7  arguments
//!     fast   64-bit  owner   0       number      X0..X3  results
//! ```

/// An unsupported call: the result in X0.
pub const NOT_SUPPORTED: u64 = -1_i64 as u64;
/// A successful call: the result in X0.
pub const SUCCESS: u64 = 0;

const FAST: u32 = 1 << 31;
const WIDE: u32 = 1 << 30;
const OWNER_ARCH: u32 = 0;

/// The architecture's own calls (DEN 0028, 7).
const SMCCC_VERSION: u32 = 0x8000_0000;
const SMCCC_ARCH_FEATURES: u32 = 0x8000_0001;
/// The version of the convention: 1.1.
const VERSION_1_1: u64 = 0x1_0001;

/// The registers of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// W0: the function's number.
    pub function: u32,
    /// X1 to X7. In a 32-bit call, only the low halves count: [`Call::arg`].
    pub args: [u64; 7],
    /// The immediate of the HVC instruction: 0 by the convention.
    pub immediate: u16,
}

impl Call {
    /// A fast call: it returns without an interrupt in between. All calls that exist here are fast.
    pub const fn is_fast(&self) -> bool {
        self.function & FAST != 0
    }

    /// A 64-bit call, whose arguments are X registers.
    pub const fn is_wide(&self) -> bool {
        self.function & WIDE != 0
    }

    /// The service that owns the number: 0 the architecture, 4 standard services (PSCI), 6 a
    /// hypervisor vendor.
    pub const fn owner(&self) -> u8 {
        (self.function >> 24 & 0x3f) as u8
    }

    /// Argument `n`, from 1 to 7, in the width of the call. Other numbers read as zero.
    pub fn arg(&self, n: usize) -> u64 {
        let value = n.checked_sub(1).and_then(|n| self.args.get(n)).copied();
        let value = value.unwrap_or(0);
        if self.is_wide() {
            value
        } else {
            value & 0xffff_ffff
        }
    }

    /// The result of the architecture's own calls: the version, and which of these calls exist.
    /// `None` for calls of other owners.
    pub fn architecture(&self) -> Option<u64> {
        if !self.is_fast() || u32::from(self.owner()) != OWNER_ARCH {
            return None;
        }
        Some(match self.function {
            SMCCC_VERSION => VERSION_1_1,
            SMCCC_ARCH_FEATURES => match self.arg(1) as u32 {
                SMCCC_VERSION | SMCCC_ARCH_FEATURES => SUCCESS,
                _ => NOT_SUPPORTED,
            },
            _ => NOT_SUPPORTED,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(function: u32, first: u64) -> Call {
        Call {
            function,
            args: [first, 2, 3, 4, 5, 6, 7],
            immediate: 0,
        }
    }

    /// DEN 0028, table 2-1.
    #[test]
    fn the_parts_of_a_function_number() {
        let vendor = call(0x8600_0001, 0xffff_ffff_0000_0001);
        assert!(vendor.is_fast() && !vendor.is_wide());
        assert_eq!(
            (vendor.owner(), vendor.arg(1)),
            (6, 1),
            "32 bits of each argument"
        );
        let psci = call(0xc400_0003, 0xffff_ffff_0000_0001);
        assert!(psci.is_wide());
        assert_eq!((psci.owner(), psci.arg(1)), (4, 0xffff_ffff_0000_0001));
        assert_eq!((psci.arg(7), psci.arg(0), psci.arg(8)), (7, 0, 0));
    }

    /// DEN 0028, 7.2 and 7.3.
    #[test]
    fn the_architecture_s_own_calls() {
        assert_eq!(call(0x8000_0000, 0).architecture(), Some(0x1_0001));
        assert_eq!(call(0x8000_0001, 0x8000_0000).architecture(), Some(0));
        assert_eq!(
            call(0x8000_0001, 0x8000_8000).architecture(),
            Some(NOT_SUPPORTED)
        );
        assert_eq!(call(0x8000_1234, 0).architecture(), Some(NOT_SUPPORTED));
        assert_eq!(call(0x8400_0000, 0).architecture(), None);
        assert_eq!(call(0, 0).architecture(), None, "not a fast call");
    }
}
