//! The streams on which collectives run. Either all collectives use one stream, or some groups use a second stream with
//! high priority. On the second stream, collectives may run before other collectives that were started earlier, such as
//! the reductions of gradient buckets.
//!
//! # Two streams do not deadlock
//!
//! The kernel of a collective occupies one multiprocessor per CTA until the other ranks have launched their kernels.
//! Programs start collectives in consistent orders. This means that there is one global order of all collectives, and
//! each rank starts its own collectives in this order.
//!
//! Consider the first incomplete collective in the global order. On each of its ranks, all earlier collectives of its
//! stream are complete, so the collective is launched. It then requires multiprocessors for its CTAs. Computation
//! kernels end eventually. The only other kernel that may keep multiprocessors is the current collective of the other
//! stream.
//!
//! If a device has enough multiprocessors for the largest collectives of both streams together, the first incomplete
//! collective gets its multiprocessors on all ranks and completes. With fewer multiprocessors, one rank may run the
//! first collective and have no room for the second, while another rank runs the second and has no room for the first.
//!
//! Ranks may use different numbers of streams: on a rank with one stream, the first incomplete collective runs alone.
//!
//! Messages are not included in this argument. Each message direction has its own stream in any case, and the number of
//! messages that a program has in flight is not known to the engine. Messages that wait for the other rank occupy
//! multiprocessors too, regardless of the number of collective streams. Set `max_ctas` of messages to leave
//! multiprocessors free for collectives.

use std::env;

use super::driver::{DeviceDriver, Priority};
use super::stream_order::StreamOrder;
use crate::nccl_config::{MAX_CTAS, NcclConfig, NcclGroup};

/// The CUDA variable that sets the number of hardware queues. With only one queue, streams wait for each other.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// The selection of the groups whose collectives run on the high-priority stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CollectiveStreams {
    high_priority: Vec<NcclGroup>,
    description: String,
}

/// The properties of a device that determine whether two streams are safe.
#[derive(Clone, Debug)]
struct Limits {
    order: StreamOrder,
    device: String,
    multiprocessors: usize,
    one_connection: bool,
}

impl CollectiveStreams {
    /// Selects the streams for the given settings and device.
    ///
    /// # Errors
    /// The reason why a requested high-priority stream is not safe, or an error of the device.
    pub fn new(
        config: &NcclConfig,
        driver: &dyn DeviceDriver,
        order: StreamOrder,
    ) -> Result<Self, String> {
        let limits = Limits {
            order,
            device: driver.name(),
            multiprocessors: driver.multiprocessors()?,
            one_connection: env::var(CONNECTIONS).is_ok_and(|value| value.trim() == "1"),
        };
        Self::within(config, &limits)
    }

    fn within(config: &NcclConfig, limits: &Limits) -> Result<Self, String> {
        let collectives = NcclGroup::ALL
            .into_iter()
            .filter(|group| *group != NcclGroup::Messages);
        let is_high = |group: &NcclGroup| {
            let usual = matches!(group, NcclGroup::Tensor | NcclGroup::Expert);
            config.group(*group).high_priority_stream.unwrap_or(usual)
        };
        let (high, normal): (Vec<_>, Vec<_>) = collectives.partition(is_high);
        let names = high.iter().map(|group| group.name()).collect::<Vec<_>>();
        let names = names.join(", ");
        let one = |reason: &str| Self {
            high_priority: vec![],
            description: format!("collectives on one stream{reason}"),
        };
        if high.is_empty() || normal.is_empty() {
            return Ok(one(""));
        }
        let most = |groups: &[NcclGroup]| {
            let ctas = groups.iter().map(|group| config.group(*group).max_ctas);
            ctas.map(|ctas| ctas.unwrap_or(MAX_CTAS)).max().unwrap_or(0) as usize
        };
        let (beside, others) = (most(&high), most(&normal));
        match limits.refusal(beside, others) {
            None => Ok(Self {
                high_priority: high,
                description: format!(
                    "collectives of {names} on a high-priority stream (at most {beside} CTAs next to {others}, of \
                     {} multiprocessors)",
                    limits.multiprocessors
                ),
            }),
            Some(reason) => {
                let asked = high
                    .iter()
                    .find(|group| config.group(**group).high_priority_stream == Some(true));
                match asked {
                    Some(group) => Err(format!(
                        "nccl.groups.{group}.high_priority_stream = true, but collectives on two streams could deadlock: \
                         {reason}; or remove it"
                    )),
                    None => Ok(one(&format!(" ({reason})"))),
                }
            }
        }
    }

    /// Returns the priority of the stream that runs the collectives of `group`.
    pub fn priority(&self, group: NcclGroup) -> Priority {
        if self.high_priority.contains(&group) {
            Priority::High
        } else {
            Priority::Normal
        }
    }

    /// Returns whether there are two collective streams.
    pub fn are_two(&self) -> bool {
        !self.high_priority.is_empty()
    }

    /// Returns a line of text for the header of a run.
    pub fn description(&self) -> &str {
        &self.description
    }
}

impl Limits {
    /// Returns the reason why two streams are not safe, and the settings that would be safe. Returns `None` if two
    /// streams are safe. `beside` and `others` are the numbers of CTAs of the largest collectives of the two streams.
    fn refusal(&self, beside: usize, others: usize) -> Option<String> {
        let Self {
            order,
            device,
            multiprocessors,
            one_connection,
        } = self;
        if *order != StreamOrder::Stream {
            return Some(format!(
                "the order \"{order}\" makes each collective wait for all work before it; expected \"stream\""
            ));
        }
        if *one_connection {
            return Some(format!(
                "{CONNECTIONS}=1 puts all streams into one queue; expected 32, or no value"
            ));
        }
        (beside + others > *multiprocessors).then(|| {
            format!(
                "at most {beside} CTAs next to {others} are more than the {multiprocessors} multiprocessors of \
                 {device}; expected max_ctas whose sum is at most {multiprocessors}, such as {} for each group",
                multiprocessors / 2
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nccl_config::NcclGroupConfig;

    fn limits(multiprocessors: usize) -> Limits {
        Limits {
            order: StreamOrder::Stream,
            device: "cuda:0".into(),
            multiprocessors,
            one_connection: false,
        }
    }

    fn config(groups: &[(NcclGroup, Option<u32>, Option<bool>)]) -> NcclConfig {
        let group = |(group, max_ctas, high_priority_stream): &(_, _, _)| {
            let config = NcclGroupConfig {
                min_ctas: None,
                max_ctas: *max_ctas,
                high_priority_stream: *high_priority_stream,
            };
            (*group, config)
        };
        NcclConfig {
            groups: groups.iter().map(group).collect(),
            ..NcclConfig::default()
        }
    }

    #[test]
    fn tensor_and_expert_groups_have_one_where_both_fit() {
        let streams = CollectiveStreams::within(&config(&[]), &limits(132)).unwrap();
        let high = NcclGroup::ALL.map(|group| streams.priority(group) == Priority::High);
        assert_eq!(high, [true, false, true, false, false, false, false]);
        let line = streams.description();
        assert!(line.contains("of tensor, expert on"), "{line}");
        assert!(line.contains("64 CTAs next to 64, of 132"), "{line}");
        let streams = CollectiveStreams::within(&config(&[]), &limits(108)).unwrap();
        assert!(!streams.are_two());
        let line = streams.description();
        assert!(
            line.contains("on one stream (at most 64 CTAs next to 64"),
            "{line}"
        );
        assert!(line.contains("such as 54 for each group"), "{line}");
    }

    #[test]
    fn fewer_ctas_make_it_safe() {
        let all = |ctas| {
            let groups = NcclGroup::ALL.map(|group| (group, Some(ctas), None));
            CollectiveStreams::within(&config(&groups), &limits(108)).unwrap()
        };
        assert!(all(54).are_two() && !all(55).are_two());
    }

    #[test]
    fn what_is_asked_for_is_not_replaced() {
        let asked = config(&[(NcclGroup::Context, None, Some(true))]);
        let error = CollectiveStreams::within(&asked, &limits(100)).unwrap_err();
        assert!(
            error.contains("nccl.groups.context.high_priority_stream"),
            "{error}"
        );
        assert!(
            error.contains("the 100 multiprocessors of cuda:0"),
            "{error}"
        );
        for (limits, part) in [
            (
                Limits {
                    order: StreamOrder::Context,
                    ..limits(132)
                },
                "expected \"stream\"",
            ),
            (
                Limits {
                    one_connection: true,
                    ..limits(132)
                },
                "CUDA_DEVICE_MAX_CONNECTIONS=1",
            ),
        ] {
            let error = CollectiveStreams::within(&asked, &limits).unwrap_err();
            assert!(error.contains(part), "{error}");
            let usual = CollectiveStreams::within(&config(&[]), &limits).unwrap();
            assert!(usual.description().contains(part), "{usual:?}");
        }
        let none = [NcclGroup::Tensor, NcclGroup::Expert].map(|group| (group, None, Some(false)));
        let streams = CollectiveStreams::within(&config(&none), &limits(132)).unwrap();
        insta::assert_snapshot!(streams.description(), @"collectives on one stream");
    }
}
