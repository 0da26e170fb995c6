//! Compares two runs of a step on one rank.

use std::collections::HashMap;

use burn_megatron::fingerprint::{Event, Site};
use serde::{Deserialize, Serialize};

/// A result that differs between two runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Difference {
    /// The position in the list of recorded results of the rank.
    pub position: usize,
    /// The operation.
    pub site: Site,
    /// Whether its inputs differ.
    pub input: bool,
    /// The indices of the returned tensors that differ. For a backward, the indices of the inputs whose gradients
    /// differ.
    pub outputs: Vec<usize>,
    /// The number of tensors that the operation returned.
    pub returned: usize,
}

/// The result of comparing two runs of a step on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    /// The runs are bit-equal.
    Equal,
    /// The results were equal until the runs executed different operations.
    OtherOperations {
        /// The next operation of the first run; `None` if the run has ended.
        first: Option<Site>,
        /// The next operation of the second run; `None` if the run has ended.
        second: Option<Site>,
    },
    /// Results differ: holds the first difference, and all differences of collectives.
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
    // Calls are matched by their keys: after the first difference, the operations between the calls may differ.
    let is_call = |event: &&Event| matches!(event.site, Site::Call(_));
    let calls: HashMap<_, _> = b.iter().filter(is_call).map(|it| (&it.site, it)).collect();
    for (at, event) in a.iter().enumerate().skip(equal + 1) {
        let other = calls.get(&event.site).filter(|other| **other != event);
        all.extend(other.map(|other| difference(at, event, other)));
    }
    Comparison::Differ(all)
}
