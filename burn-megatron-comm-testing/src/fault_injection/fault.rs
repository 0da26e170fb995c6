//! Faults and their string form.

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
    /// The call starts late. The string form is, for example, `delay:2.5s` or `delay:100ms`.
    Delay(Duration),
    /// The call is never started, and its wait fails after 1.5 times the
    /// [`FaultPlan::deadline`](super::FaultPlan::deadline). The string form is `drop`.
    Drop,
    /// The input of the call has more elements than it should have. The string form is `shape`. The input of a
    /// reduce_scatter gets one more element per chunk, and the input of an all_to_all gets one more element per rank.
    /// With other lengths, the rank itself would reject the call. The input of any other call gets one more element. A
    /// barrier has no elements, so it returns an error.
    Shape,
    /// The rank issues a different operation: an all_gather instead of an all_reduce, and an all_reduce instead of any
    /// other operation. The string form is `wrong-call`.
    WrongCall,
    /// The first element of the input is set to NaN. If the input is not floating-point, the call returns an error. The
    /// string form is `nan`.
    Nan,
    /// One bit of a tensor is flipped. The string form is `bit-flip:TARGET` or `bit-flip:TARGET:ELEMENT:BIT`. The
    /// trainer applies bit flips for all targets except `collective`. For these targets, [`Fault::call`] is the number
    /// of the tensor.
    BitFlip(BitFlip),
    /// The rank panics. The string form is `panic`.
    Panic,
    /// The call returns an error. The string form is `error`.
    Error,
    /// The process receives the signal SIGKILL. The string form is `kill`.
    Kill,
    /// The process aborts. The string form is `abort`.
    Abort,
    /// The process writes to unmapped memory. The string form is `segfault`.
    Segfault,
    /// The process receives the signal SIGSTOP and is suspended until it receives SIGCONT. The string form is `stop`.
    Stop,
    /// The process receives the signal SIGTERM. The call continues. The string form is `terminate`.
    Terminate,
    /// The process receives the signal SIGINT. The call continues. The string form is `interrupt`.
    Interrupt,
    /// The rank runs an endless loop. The string form is `spin`.
    Spin,
    /// The rank does not start. The string form is `never-starts`. This fault affects the process and not a call. The
    /// program must check [`FaultPlan::never_starts`](super::FaultPlan::never_starts).
    NeverStarts,
}

/// The names of the kinds of faults that have no parameter.
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
    /// The world rank on which the fault triggers.
    pub rank: usize,
    /// The training step, as passed to [`begin_step`](burn_megatron_comm::Communicator::begin_step). If `None`, the
    /// calls are counted from the start of the run.
    pub step: Option<u64>,
    /// The number of the call, counted from 0 at the start of the step, over all groups of the rank. Splits are not
    /// counted. For a [bit flip](FaultKind::BitFlip) outside of collectives, this is the number of the tensor. The
    /// number is not used for [`FaultKind::NeverStarts`].
    pub call: u64,
}

/// The error for an invalid fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// The string form of the fault cannot be parsed.
    #[error(
        "invalid fault {text:?}: {reason}; expected KIND@rank=N,call=N or KIND@rank=N,step=N,call=N, where KIND \
         is delay:TIME (as in delay:2.5s, delay:100ms), bit-flip:TARGET (as in bit-flip:weight, bit-flip:gradient:3:30), {}, or never-starts@rank=N",
        kind_names()
    )]
    Text {
        /// The string that was given.
        text: String,
        /// The reason why the string is invalid.
        reason: String,
    },
    /// The rank of the fault is not in the world.
    #[error(
        "invalid fault {fault}: the world has {size} ranks; expected rank 0 to {}",
        .size.saturating_sub(1)
    )]
    Rank {
        /// The invalid fault.
        fault: Fault,
        /// The number of ranks in the world.
        size: usize,
    },
    /// The step of the fault is not in the run.
    #[error(
        "invalid fault {fault}: step {} is not in this run; expected {}",
        .fault.step.unwrap_or_default(),
        expected(.steps)
    )]
    Step {
        /// The invalid fault.
        fault: Fault,
        /// The steps of the run.
        steps: Range<u64>,
    },
}

impl Fault {
    /// Returns whether the fault does not trigger at a communicator call. This is the case for `never-starts` and for
    /// bit flips outside of collectives.
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
    /// Writes the string form, which can be parsed again.
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
    /// Writes the string form, which can be parsed again.
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

    /// Parses the kind of a fault. The error is the reason why the string is invalid.
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
        (None, None) => return Err(format!("the time {text:?} requires a unit (s or ms)")),
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
        return Err("@rank=N is missing".to_owned());
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
    let rank = rank.ok_or("rank is missing")?;
    let rank = usize::try_from(rank).map_err(|_| format!("rank {rank} is too large"))?;
    let call = match (kind, step, call) {
        (FaultKind::NeverStarts, None, None) => 0,
        (FaultKind::NeverStarts, ..) => {
            return Err("never-starts takes neither step nor call".to_owned());
        }
        (_, _, call) => call.ok_or("call is missing")?,
    };
    Ok(Fault {
        kind,
        rank,
        step,
        call,
    })
}
