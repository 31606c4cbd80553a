//! Tokens connect a page-ready with its page-not-present.

/// A name for one fault, unique among a VM's faults in flight. It is never 0, which means "none" in
/// the words shared by guest and host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Token(u32);

impl Token {
    /// Page-ready for every task that sleeps on this vCPU.
    pub const WAKE_ALL: Self = Self(u32::MAX);

    /// The token of an event delivered before the state was saved; `None` for 0.
    pub(crate) const fn from_guest(number: u32) -> Option<Self> {
        match number {
            0 => None,
            number => Some(Self(number)),
        }
    }

    /// The number that the guest sees.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number as the value of an address register, such as CR2.
    pub const fn address(self) -> u64 {
        self.0 as u64
    }
}

/// The format of an architecture's tokens: the vCPU's number in the low bits, a counter above it. A
/// guest may keep the sleepers of all vCPUs in one table, so two vCPUs must not give out the same
/// token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenFormat {
    /// Low bits that hold the vCPU.
    pub vcpu_bits: u32,
    /// Bits of the counter above them; the counter wraps around.
    pub id_bits: u32,
}

/// Makes the tokens of one vCPU.
pub(crate) struct Tokens {
    vcpu: u32,
    id: u32,
    wrapped: bool,
}

impl Tokens {
    /// # Panics
    /// If `vcpu` does not fit in the token.
    pub fn new(format: TokenFormat, vcpu: u32) -> Self {
        let TokenFormat { vcpu_bits, id_bits } = format;
        assert!(vcpu_bits + id_bits <= u32::BITS && id_bits > 0 && vcpu_bits < u32::BITS);
        assert!(
            vcpu < 1 << vcpu_bits,
            "a token has {vcpu_bits} bits for the vCPU"
        );
        Self {
            vcpu,
            id: 0,
            wrapped: false,
        }
    }

    /// The vCPU whose tokens these are.
    pub const fn vcpu(&self) -> u32 {
        self.vcpu
    }

    /// Whether the counter has wrapped around, so that a new token may be in use already.
    pub const fn have_wrapped(&self) -> bool {
        self.wrapped
    }

    /// The next token. It is never 0 and never the wake-all.
    pub fn next(&mut self, format: TokenFormat) -> Token {
        let TokenFormat { vcpu_bits, id_bits } = format;
        loop {
            self.id = (self.id + 1) & (u32::MAX >> (u32::BITS - id_bits));
            self.wrapped |= self.id == 0;
            let token = Token(self.id << vcpu_bits | self.vcpu);
            if self.id != 0 && token != Token::WAKE_ALL {
                return token;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: TokenFormat = TokenFormat {
        vcpu_bits: 12,
        id_bits: 20,
    };

    /// The counter wraps twice, for vCPU 0 and for the vCPU whose number is all ones.
    #[test]
    fn a_token_names_its_vcpu_and_is_never_zero_or_all_ones() {
        for vcpu in [0, 5, 0xfff] {
            let mut tokens = Tokens::new(FORMAT, vcpu);
            for _ in 0..2 << 20 {
                let token = tokens.next(FORMAT);
                assert_eq!(token.get() & 0xfff, vcpu);
                assert!(token.get() >> 12 != 0 && token != Token::WAKE_ALL);
            }
        }
    }

    #[test]
    fn tokens_repeat_only_after_all_ids() {
        let mut tokens = Tokens::new(FORMAT, 1);
        let first = tokens.next(FORMAT);
        let again = (1..).find(|_| tokens.next(FORMAT) == first);
        assert_eq!(again, Some((1 << 20) - 1));
    }

    /// 16 bits of counter above 12 bits of vCPU: 4 bits stay zero.
    #[test]
    fn a_counter_of_fewer_bits_wraps_within_them() {
        let format = TokenFormat {
            vcpu_bits: 12,
            id_bits: 16,
        };
        let mut tokens = Tokens::new(format, 3);
        let seen: Vec<u32> = (0..0x1_0000).map(|_| tokens.next(format).get()).collect();
        assert!(
            seen.iter()
                .all(|token| token >> 28 == 0 && token & 0xfff == 3)
        );
        assert_eq!(seen[0], seen[0xffff], "all ids but 0 precede a repetition");
    }
}
