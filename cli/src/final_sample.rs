//! The text that a run generates at its end.

use std::io;

use burn_megatron::comm::{CommError, Communicator, ReduceOp};

use crate::error::Error;

/// Receives the new part of a text. An error ends the text.
pub type OnText<'a> = &'a mut dyn FnMut(&str) -> io::Result<()>;

// Signals that the ranks exchange. All ranks act on the maximum.
const ENDED: u8 = 0;
const WRITING: u8 = 1;
const STOP: u8 = 2;

/// Runs `generate` on the ranks on which it is set, and returns the text on these ranks. The other ranks wait for the
/// end of the text.
///
/// All ranks exchange a signal after each token. Therefore the timeout of a collective applies to a token, not to the
/// whole text. The text ends early if `stop` is true on a rank. Collective: call on all ranks of `world`. Every rank
/// with `generate` must write the same text.
///
/// # Errors
///
/// Returns the errors of `generate` and of the exchange.
pub fn generate<T>(
    world: &dyn Communicator,
    generate: Option<impl FnOnce(OnText<'_>) -> Result<T, Error>>,
    stop: impl Fn() -> bool,
) -> Result<Option<String>, Error> {
    let exchange = |own: u8| {
        let signal = if stop() { STOP } else { own };
        world.all_reduce_scalar(signal, ReduceOp::Max)
    };
    let Some(generate) = generate else {
        while exchange(ENDED)? == WRITING {}
        return Ok(None);
    };
    let mut text = String::new();
    let mut last: Result<u8, CommError> = Ok(WRITING);
    let written = generate(&mut |new| {
        text.push_str(new);
        last = exchange(WRITING);
        match last {
            Ok(WRITING) => Ok(()),
            _ => Err(io::ErrorKind::Interrupted.into()),
        }
    });
    if last? == WRITING {
        written?;
        exchange(ENDED)?;
    }
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Duration;

    use burn_megatron::comm::World;

    use super::*;

    /// Writes a text of five tokens on two of three ranks. Returns the texts of all ranks.
    fn texts(
        token: Duration,
        deadline: Duration,
        stop: impl Fn(usize) -> bool + Sync,
        fail: bool,
    ) -> Result<Vec<Option<String>>, String> {
        let world = World::threads(3).unwrap().deadline(deadline);
        let ran = world.run(|rank| {
            let write = |on_text: OnText<'_>| -> Result<(), Error> {
                for number in 0..5 {
                    sleep(token);
                    on_text(&number.to_string())?;
                }
                if fail {
                    return Err("not finite".into());
                }
                Ok(())
            };
            let write = (rank.rank() < 2).then_some(write);
            generate(&*rank.communicator(), write, || stop(rank.rank()))
        });
        ran.map_err(|error| error.to_string())
    }

    #[test]
    fn a_text_may_take_longer_than_the_deadline_of_a_call() {
        let (token, deadline) = (Duration::from_millis(800), Duration::from_secs(3));
        let text = Some("01234".to_string());
        assert_eq!(
            texts(token, deadline, |_| false, false),
            Ok(vec![text.clone(), text, None])
        );
    }

    #[test]
    fn a_stop_of_any_rank_ends_the_text_on_all_ranks() {
        for stopping in 0..3 {
            let stop = |rank| rank == stopping;
            let text = Some("0".to_string());
            assert_eq!(
                texts(Duration::ZERO, Duration::from_secs(30), stop, false),
                Ok(vec![text.clone(), text, None])
            );
        }
    }

    #[test]
    fn a_failed_text_is_reported() {
        let failed = texts(Duration::ZERO, Duration::from_secs(30), |_| false, true);
        assert!(failed.unwrap_err().contains("not finite"));
    }
}
