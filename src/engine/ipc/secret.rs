//! What shows that a process was given a handle: bytes of the system's that nobody can guess.

use std::fmt;
use std::hint::black_box;
use std::io;

/// The secret of one thing that is shared. It is in the thing's handles, and nowhere else.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Secret([u8; 16]);

impl Secret {
    /// Of nothing: no question with it is answered.
    pub const NONE: Secret = Secret([0; 16]);

    /// Another one each time.
    pub fn new() -> io::Result<Secret> {
        random().map(Secret)
    }

    /// Whether they are the same. Takes as long wherever they differ, so that nobody finds one byte by byte.
    pub fn is(&self, other: &Secret) -> bool {
        let pairs = self.0.iter().zip(&other.0);
        black_box(pairs.fold(0, |found, (one, two)| found | black_box(one ^ two))) == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a secret")
    }
}

/// Bytes that nobody can guess.
pub fn random() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    loop {
        // SAFETY: 16 bytes to be written.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        if got == bytes.len() as isize {
            return Ok(bytes);
        }
        // So few bytes come whole or not at all.
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_told_from_any_other_and_is_never_shown() {
        let (one, two) = (
            Secret::new().expect("random"),
            Secret::new().expect("random"),
        );
        assert!(one.is(&one) && !one.is(&two) && !one.is(&Secret::NONE));
        for bit in 0..128 {
            let mut other = one;
            other.0[bit / 8] ^= 1 << (bit % 8);
            assert!(!one.is(&other), "bit {bit}");
        }
        assert_eq!(format!("{one:?}"), "a secret");
    }
}
