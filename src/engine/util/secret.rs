//! Secrets in IPC handles: random bytes that prove that a process was sent the handle.

use std::fmt;
use std::hint::black_box;
use std::io;

/// The secret of one span or allocation: only its handles hold it. Never printed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Secret([u8; 16]);

impl Secret {
    /// For requests that need none. Never generated.
    pub const NONE: Secret = Secret([0; 16]);

    /// A new random secret.
    pub fn new() -> io::Result<Secret> {
        random().map(Secret)
    }

    /// Whether they are equal, in constant time, so that a secret cannot be guessed byte by byte.
    pub fn matches(&self, other: &Secret) -> bool {
        let pairs = self.0.iter().zip(&other.0);
        black_box(pairs.fold(0, |found, (one, two)| found | black_box(one ^ two))) == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a secret")
    }
}

/// 16 random bytes from the system.
pub fn random() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    loop {
        // SAFETY: 16 bytes to be written.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        if got == bytes.len() as isize {
            return Ok(bytes);
        }
        // Requests of up to 256 bytes are never met in part.
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
        assert!(one.matches(&one) && !one.matches(&two) && !one.matches(&Secret::NONE));
        for bit in 0..128 {
            let mut other = one;
            other.0[bit / 8] ^= 1 << (bit % 8);
            assert!(!one.matches(&other), "bit {bit}");
        }
        assert_eq!(format!("{one:?}"), "a secret");
    }
}
