//! The differences between two runs of a step on one rank.

use std::collections::HashMap;

use burn_megatron::fingerprint::{Event, Site};
use serde::{Deserialize, Serialize};

/// Something that two runs computed differently.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Difference {
    /// The position among what the rank computed.
    pub position: usize,
    /// The computation.
    pub site: Site,
    /// Whether it got other inputs.
    pub input: bool,
    /// The numbers of the tensors of what it returned that are others; of a backward, those of the inputs whose gradients
    /// are.
    pub outputs: Vec<usize>,
    /// The number of tensors that it returned.
    pub returned: usize,
}

/// Two runs of a step on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    /// They are bit-equal.
    Equal,
    /// They had the same results until the second ran other operations than the first.
    OtherOperations {
        /// Where the first run is; `None` if it has ended.
        first: Option<Site>,
        /// Where the second run is; `None` if it has ended.
        second: Option<Site>,
    },
    /// They differ: the first difference, and all those of calls, which other ranks take part in.
    Differ(Vec<Difference>),
}

/// Compares two runs of one rank.
pub(super) fn compare(a: &[Event], b: &[Event]) -> Comparison {
    let equal = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let (first, other) = match (a.get(equal), b.get(equal)) {
        (None, None) => return Comparison::Equal,
        (Some(first), Some(other)) if first.site == other.site => (first, other),
        (first, second) => {
            return Comparison::OtherOperations {
                first: first.map(|event| event.site.clone()),
                second: second.map(|event| event.site.clone()),
            };
        }
    };
    let difference = |position: usize, a: &Event, b: &Event| {
        let pairs = a.outputs.iter().zip(&b.outputs).enumerate();
        let outputs = pairs.filter(|(_, (a, b))| a != b);
        Difference {
            position,
            site: a.site.clone(),
            input: a.input != b.input,
            outputs: outputs.map(|(number, _)| number).collect(),
            returned: a.outputs.len(),
        }
    };
    let mut all = vec![difference(equal, first, other)];
    // By their keys: from the first difference on, the operations between the calls may be others.
    let is_call = |event: &&Event| matches!(event.site, Site::Call(_));
    let calls: HashMap<_, _> = b.iter().filter(is_call).map(|it| (&it.site, it)).collect();
    for (at, event) in a.iter().enumerate().skip(equal + 1) {
        let other = calls.get(&event.site).filter(|other| **other != event);
        all.extend(other.map(|other| difference(at, event, other)));
    }
    Comparison::Differ(all)
}
