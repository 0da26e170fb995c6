//! What a rank may send, from bytes: for the fuzz target `rendezvous`.

use std::io::{self, Read, Write};
use std::time::Duration;

use super::message::{self, Down, Hello, Up};
use super::registry::{Patience, Registry};
use super::{Failure, PURPOSE};
use crate::auth::Token;
use crate::auth::{Admission, admit};

/// Reads what somebody sends to the rendezvous of a world of two ranks: first as bytes that come before any
/// token was shown, which let nobody in; then as the hello of a rank that has shown it and its lines. Whether
/// all of that is what a rank says.
///
/// # Panics
/// Where the bytes let somebody in, or where something is told to a rank that a terminal would obey.
#[doc(hidden)]
pub fn read_session(input: &[u8]) -> bool {
    let token: Token = "5".repeat(64).parse().expect("64 digits");
    let admitted = admit(&mut Wire { from: input }, Some(&token), PURPOSE, || true);
    assert!(
        !matches!(admitted, Ok(Admission::Known(_))),
        "a stranger was let in"
    );

    let (hello, mut lines) = match input.iter().position(|byte| *byte == b'\n') {
        Some(end) => (&input[..end], &input[end + 1..]),
        None => (input, &[][..]),
    };
    let hello = std::str::from_utf8(hello).ok();
    let Some(Ok(hello)) = hello.map(Hello::read) else {
        return false;
    };
    let minute = Duration::from_secs(60);
    let patience = Patience {
        gather: minute,
        silence: minute,
    };
    let (rank, mut registry) = (hello.rank, Registry::new(2, hello.world, patience));
    if registry.join(hello, Duration::ZERO).is_err() {
        return false;
    }
    loop {
        match message::read::<Up>(&mut lines) {
            Ok(Some(word)) => {
                let said = registry.hear(rank, word, Duration::ZERO);
                said.into_iter().for_each(|(_, word)| check(&word));
            }
            Ok(None) => break,
            Err(_) => return false,
        }
    }
    let said = registry.closed(rank, minute).into_iter();
    said.chain(registry.tick(2 * minute))
        .for_each(|(_, word)| check(&word));
    true
}

/// Nothing in a verdict moves the cursor of a terminal, and it has an end.
fn check(word: &Down) {
    if let Down::Failure(Failure {
        message, verdict, ..
    }) = word
    {
        for text in [message, verdict] {
            let obeyed = |c: char| c.is_control() && c != '\n' && c != '\t';
            assert!(!text.contains(obeyed), "{text:?} is told to a terminal");
        }
    }
}

/// A connection over which these bytes come; what is answered is of no interest.
struct Wire<'a> {
    from: &'a [u8],
}

impl Read for &mut Wire<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.from.read(bytes)
    }
}

impl Write for &mut Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
