//! Faults and their text form.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use super::bit_flip::{self, BitFlip, FlipTarget};
use super::signals;

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// `delay:2.5s`, `delay:100ms`: the call starts late.
    Delay(Duration),
    /// `drop`: the call is never started. Its wait fails after 1.5 times the
    /// [`FaultPlan::deadline`](super::FaultPlan::deadline).
    Drop,
    /// `shape`: the call has one element too many. A reduce_scatter gets one more element per chunk and an all_to_all
    /// one more per rank, because the rank itself would reject other lengths. A barrier has no elements, so it returns
    /// an error.
    Shape,
    /// `wrong-call`: an all_gather instead of an all_reduce, or an all_reduce instead of any other operation.
    WrongCall,
    /// `nan`: sets the first element of the input to NaN. An input without floats is an error.
    Nan,
    /// `bit-flip:TARGET`, `bit-flip:TARGET:ELEMENT:BIT`: flips one bit of a tensor. The trainer applies all targets
    /// except `collective`. For these targets, `call` is the number of the tensor.
    BitFlip(BitFlip),
    /// `panic`: the rank panics.
    Panic,
    /// `error`: the call returns an error.
    Error,
    /// `kill`: the process receives SIGKILL.
    Kill,
    /// `abort`: the process aborts.
    Abort,
    /// `segfault`: the process writes to unmapped memory.
    Segfault,
    /// `stop`: the process receives SIGSTOP and is suspended until it receives SIGCONT.
    Stop,
    /// `terminate`: the process receives SIGTERM. The call continues.
    Terminate,
    /// `interrupt`: the process receives SIGINT. The call continues.
    Interrupt,
    /// `spin`: the rank runs an endless loop.
    Spin,
    /// `never-starts`: the rank does not start. This fault affects the process and not a call. The program checks
    /// [`FaultPlan::never_starts`](super::FaultPlan::never_starts).
    NeverStarts,
}

/// The names of the kinds without a parameter.
const KIND_NAMES: [(&str, FaultKind); 14] = [
    ("drop", FaultKind::Drop),
    ("shape", FaultKind::Shape),
    ("wrong-call", FaultKind::WrongCall),
    ("nan", FaultKind::Nan),
    ("panic", FaultKind::Panic),
    ("error", FaultKind::Error),
    ("kill", FaultKind::Kill),
    ("abort", FaultKind::Abort),
    ("segfault", FaultKind::Segfault),
    ("stop", FaultKind::Stop),
    ("terminate", FaultKind::Terminate),
    ("interrupt", FaultKind::Interrupt),
    ("spin", FaultKind::Spin),
    ("never-starts", FaultKind::NeverStarts),
];

/// A fault at one call of one rank, for example `kill@rank=3,step=5,call=12`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kind of the fault.
    pub kind: FaultKind,
    /// The world rank with the fault.
    pub rank: usize,
    /// The step, as passed to [`begin_step`](burn_megatron_comm::Communicator::begin_step). If `None`, calls are
    /// counted from the start of the run.
    pub step: Option<u64>,
    /// The number of the rank's call over all its groups, counted from 0 at the start of the step. For a [bit
    /// flip](FaultKind::BitFlip) outside of collectives, the number of the tensor. Splits are not counted. Unused for
    /// [`FaultKind::NeverStarts`].
    pub call: u64,
}

/// An error about an invalid fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// The text cannot be parsed.
    #[error(
        "invalid fault {text:?}: {reason}; expected KIND@rank=N,call=N or KIND@rank=N,step=N,call=N, where KIND \
         is delay:TIME (as in delay:2.5s, delay:100ms), bit-flip:TARGET (as in bit-flip:weight, bit-flip:gradient:3:30), {}, or never-starts@rank=N",
        kind_names()
    )]
    Text {
        /// The text.
        text: String,
        /// The reason why the text is invalid.
        reason: String,
    },
    /// The rank is not in the world.
    #[error(
        "invalid fault {fault}: the world has {size} ranks; expected rank 0 to {}",
        .size.saturating_sub(1)
    )]
    Rank {
        /// The fault.
        fault: Fault,
        /// The number of ranks.
        size: usize,
    },
    /// The step is not in the run.
    #[error(
        "invalid fault {fault}: step {} is not in this run; expected {}",
        .fault.step.unwrap_or_default(),
        expected(.steps)
    )]
    Step {
        /// The fault.
        fault: Fault,
        /// The steps of the run.
        steps: Range<u64>,
    },
}

impl Fault {
    /// Returns whether the fault does not trigger at a communicator call: `never-starts`, or a bit flip outside of
    /// collectives.
    pub(super) fn is_elsewhere(&self) -> bool {
        match self.kind {
            FaultKind::NeverStarts => true,
            FaultKind::BitFlip(flip) => flip.target != FlipTarget::Collective,
            _ => false,
        }
    }

    /// Returns the bit that the fault flips in a tensor of kind `target` on this rank, or `None`.
    pub(super) fn flip_of(&self, rank: usize, target: FlipTarget) -> Option<BitFlip> {
        match self.kind {
            FaultKind::BitFlip(flip) if self.rank == rank && flip.target == target => Some(flip),
            _ => None,
        }
    }
}

fn expected(steps: &Range<u64>) -> String {
    match steps.end.saturating_sub(steps.start) {
        0 => "a run with steps left".into(),
        1 => format!("step {}", steps.start),
        _ => format!("steps {} to {}", steps.start, steps.end - 1),
    }
}

fn kind_names() -> String {
    let words = KIND_NAMES.iter().map(|(word, _)| *word);
    let words = words.filter(|word| *word != "never-starts");
    words.collect::<Vec<_>>().join(", ")
}

impl fmt::Display for FaultKind {
    /// Writes the text form, which can be parsed again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let FaultKind::Delay(time) = self {
            return write!(f, "delay:{}s", time.as_secs_f64());
        }
        if let FaultKind::BitFlip(flip) = self {
            return flip.fmt(f);
        }
        let mut words = KIND_NAMES.iter().filter(|(_, kind)| kind == self);
        f.write_str(words.next().map_or("", |(word, _)| word))
    }
}

impl fmt::Display for Fault {
    /// Writes the text form, which can be parsed again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@rank={}", self.kind, self.rank)?;
        if self.kind == FaultKind::NeverStarts {
            return Ok(());
        }
        if let Some(step) = self.step {
            write!(f, ",step={step}")?;
        }
        write!(f, ",call={}", self.call)
    }
}

impl FromStr for FaultKind {
    type Err = String;

    /// Parses the kind of a fault. The error is the reason why the text is invalid.
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(time) = text.strip_prefix("delay:") {
            return duration(time).map(FaultKind::Delay);
        }
        if text.starts_with(bit_flip::PREFIX) {
            return text.parse().map(FaultKind::BitFlip);
        }
        let mut words = KIND_NAMES.iter().filter(|(word, _)| *word == text);
        let kind = words.next().map(|(_, kind)| *kind);
        let kind = kind.ok_or_else(|| format!("unknown kind {text:?}"))?;
        signals::check(kind).map(|()| kind)
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    let (number, scale) = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(number), _) => (number, 1e-3),
        (None, Some(number)) => (number, 1.0),
        (None, None) => return Err(format!("the time {text:?} has no unit, s or ms")),
    };
    let seconds: f64 = number
        .parse()
        .map_err(|_| format!("{number:?} is not a number"))?;
    Duration::try_from_secs_f64(seconds * scale)
        .map_err(|error| format!("{text:?} is not a duration: {error}"))
}

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        parse(text).map_err(|reason| FaultError::Text {
            text: text.to_owned(),
            reason,
        })
    }
}

fn parse(text: &str) -> Result<Fault, String> {
    let Some((kind, site)) = text.split_once('@') else {
        return Err("it has no @rank=N".to_owned());
    };
    let kind: FaultKind = kind.parse()?;
    let [mut rank, mut step, mut call] = [None; 3];
    for setting in site.split(',') {
        let Some((key, value)) = setting.split_once('=') else {
            return Err(format!("{setting:?} is not KEY=NUMBER"));
        };
        let slot = match key {
            "rank" => &mut rank,
            "step" => &mut step,
            "call" => &mut call,
            _ => return Err(format!("unknown key {key:?}")),
        };
        let number: u64 = value
            .parse()
            .map_err(|_| format!("{key} is {value:?}, which is not a whole number"))?;
        if slot.replace(number).is_some() {
            return Err(format!("{key} is given twice"));
        }
    }
    let rank = rank.ok_or("it has no rank")?;
    let rank = usize::try_from(rank).map_err(|_| format!("no world has a rank {rank}"))?;
    let call = match (kind, step, call) {
        (FaultKind::NeverStarts, None, None) => 0,
        (FaultKind::NeverStarts, ..) => {
            return Err("a rank that never starts has no step and no call".to_owned());
        }
        (_, _, call) => call.ok_or("it has no call")?,
    };
    Ok(Fault {
        kind,
        rank,
        step,
        call,
    })
}
