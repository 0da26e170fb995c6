//! Parses and formats layouts, such as `tp2-sp-dp2`.

use std::fmt;
use std::str::FromStr;

use super::Layout;
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::mesh::{ContextExchange, ContextSplit, ScheduleKind, TpCommOverlap};

/// The error for a text that cannot be parsed as a [`Layout`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid layout \"{text}\": \"{part}\" {fault}")]
pub struct ParseLayoutError {
    /// The whole text.
    pub text: String,
    /// The invalid part of the text.
    pub part: String,
    /// The reason why this part is invalid.
    pub fault: LayoutPartError,
}

/// The reason why a part of the text of a layout is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutPartError {
    /// The part is unknown.
    #[error(
        "is not one of tpN, sp, cpN, epN, etpN, dpN, ppN, mbN, zN, hsdpN, nodeN (tensor, sequence, context, expert, \
         expert-tensor, data and pipeline parallelism, micro-batch, ZeRO stage, ranks of a sharding group and of a \
         node), an exchange (ring, allgather, alltoall, uspN with N ranks in an all-to-all) or a split (contiguous, \
         striped, perdocument) of context parallelism, hybridN (hybrid context parallelism, at most N tokens per \
         rank), epoverlap (exchanges of experts under another micro-batch), an overlap of sequence parallelism \
         (tpring, tpbulk, or with N chunks tpringN, tpbulkN), as in tp2-sp-dp2, tp2-sp-tpring-dp2, cp4-ring-striped \
         and dp4-z3-hsdp2, nor after a slash a schedule or vN (stages on each rank), as in pp2-mb1/interleaved/v2"
    )]
    Unknown,
    /// The part repeats an earlier part.
    #[error("repeats an earlier part: expected each part at most once, as in tp2-sp-dp2")]
    Repeated,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parallel = &self.parallel;
        write!(f, "tp{}", parallel.tensor)?;
        if parallel.sequence_parallel {
            write!(f, "-sp")?;
        }
        if let Some(method) = parallel.tp_comm_overlap {
            write!(f, "-tp{method}")?;
        }
        if let Some(splits) = parallel.tp_comm_overlap_num_splits {
            write!(f, "{splits}")?;
        }
        if parallel.context > 1 {
            write!(f, "-cp{}", parallel.context)?;
        }
        if let Some(exchange) = parallel.context_exchange {
            match parallel.context_inner {
                Some(inner) => write!(f, "-usp{inner}")?,
                None => write!(f, "-{}", named(exchange, &EXCHANGES))?,
            }
        }
        if parallel.context_split != ContextSplit::Zigzag {
            write!(f, "-{}", named(parallel.context_split, &SPLITS))?;
        }
        if let Some(tokens) = parallel.hybrid_tokens() {
            write!(f, "-hybrid{tokens}")?;
        }
        if parallel.expert > 1 {
            write!(f, "-ep{}", parallel.expert)?;
        }
        if let Some(ranks) = parallel.expert_tensor {
            write!(f, "-etp{ranks}")?;
        }
        if parallel.overlap_moe_expert_parallel_comm {
            write!(f, "-epoverlap")?;
        }
        if parallel.pipeline > 1 {
            write!(f, "-pp{}", parallel.pipeline)?;
        }
        write!(f, "-dp{}", parallel.data_size())?;
        if let Some(size) = self.micro_batch {
            write!(f, "-mb{size}")?;
        }
        if parallel.zero_stage != ZeroStage::Replicated {
            write!(f, "-z{}", parallel.zero_stage)?;
        }
        if let Some(ranks) = parallel.hsdp {
            write!(f, "-hsdp{ranks}")?;
        }
        if let Some(ranks) = parallel.ranks_per_node {
            write!(f, "-node{ranks}")?;
        }
        if parallel.pipeline > 1 {
            write!(f, "/{}", parallel.schedule.clone().unwrap_or_default())?;
        }
        match parallel.virtual_stages {
            Some(stages) => write!(f, "/v{stages}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Layout {
    type Err = ParseLayoutError;

    fn from_str(text: &str) -> Result<Self, ParseLayoutError> {
        let mut layout = Self::default();
        let (sizes, schedule) = text.split_once('/').unwrap_or((text, ""));
        let wrong = |part: &str, fault| ParseLayoutError {
            text: text.into(),
            part: part.into(),
            fault,
        };
        let mut named = vec![];
        let mut once = |part, name| {
            if named.contains(&name) {
                Err(wrong(part, LayoutPartError::Repeated))
            } else {
                named.push(name);
                Ok(())
            }
        };
        for part in schedule.split('/').filter(|part| !part.is_empty()) {
            once(
                part,
                layout
                    .set_schedule(part)
                    .ok_or_else(|| wrong(part, LayoutPartError::Unknown))?,
            )?;
        }
        for part in sizes.split('-') {
            once(
                part,
                layout
                    .set_size(part)
                    .ok_or_else(|| wrong(part, LayoutPartError::Unknown))?,
            )?;
        }
        Ok(layout)
    }
}

impl Layout {
    /// Sets a part after a slash and returns its name, or `None` if the part is unknown.
    fn set_schedule(&mut self, part: &str) -> Option<&'static str> {
        if let Some(stages) = size(part, "v") {
            self.parallel.virtual_stages = Some(stages);
            return Some("v");
        }
        let kind: ScheduleKind = part.parse().ok()?;
        self.parallel.schedule = Some(kind.into());
        Some("schedule")
    }

    /// Sets a part before a slash and returns its name, or `None` if the part is unknown.
    fn set_size(&mut self, part: &str) -> Option<&'static str> {
        if part == "sp" {
            self.parallel.sequence_parallel = true;
            return Some("sp");
        }
        if part == "epoverlap" {
            self.parallel.overlap_moe_expert_parallel_comm = true;
            return Some("epoverlap");
        }
        if let Some(method) = part.strip_prefix("tp").and_then(|name| name.parse().ok()) {
            self.parallel.tp_comm_overlap = Some(method);
            return Some("overlap");
        }
        let splits = |method: &TpCommOverlap| size(part, &format!("tp{method}"));
        let mut methods = TpCommOverlap::ALL.into_iter();
        if let Some((method, splits)) = methods.find_map(|it| Some((it, splits(&it)?))) {
            self.parallel.tp_comm_overlap = Some(method);
            self.parallel.tp_comm_overlap_num_splits = Some(splits);
            return Some("overlap");
        }
        if let Some((_, exchange)) = EXCHANGES.iter().find(|(name, _)| *name == part) {
            self.parallel.context_exchange = Some(*exchange);
            return Some("exchange");
        }
        if let Some((_, split)) = SPLITS.iter().find(|(name, _)| *name == part) {
            self.parallel.context_split = *split;
            return Some("split");
        }
        if let Some(tokens) = size(part, "hybrid") {
            self.parallel = std::mem::take(&mut self.parallel).with_hybrid_context_parallel(tokens);
            return Some("hybrid");
        }
        if let Some(inner) = size(part, "usp") {
            self.parallel = std::mem::take(&mut self.parallel).with_context_inner(inner);
            return Some("exchange");
        }
        if let Some(stage) = part.strip_prefix("z").and_then(|n| n.parse().ok()) {
            self.parallel.zero_stage = stage;
            return Some("z");
        }
        let names = ["hsdp", "node", "etp", "ep", "cp", "tp", "dp", "pp", "mb"].into_iter();
        let (name, size) = names
            .filter_map(|name| Some((name, size(part, name)?)))
            .next()?;
        match name {
            "hsdp" => self.parallel.hsdp = Some(size),
            "node" => self.parallel.ranks_per_node = Some(size),
            "etp" => self.parallel.expert_tensor = Some(size),
            "ep" => self.parallel.expert = size,
            "cp" => self.parallel.context = size,
            "tp" => self.parallel.tensor = size,
            "dp" => self.parallel.data = Some(size),
            "pp" => self.parallel.pipeline = size,
            _ => self.micro_batch = Some(size),
        }
        Some(name)
    }
}

/// The exchange methods of context parallelism that have no parameter.
const EXCHANGES: [(&str, ContextExchange); 3] = [
    ("ring", ContextExchange::Ring),
    ("allgather", ContextExchange::AllGather),
    ("alltoall", ContextExchange::AllToAll),
];

/// The sequence splits of context parallelism, except the default split.
const SPLITS: [(&str, ContextSplit); 3] = [
    ("contiguous", ContextSplit::Contiguous),
    ("striped", ContextSplit::Striped),
    ("perdocument", ContextSplit::ZigzagPerDocument),
];

fn named<T: PartialEq>(value: T, names: &[(&'static str, T)]) -> &'static str {
    let found = names.iter().find(|(_, named)| *named == value);
    found.map_or("hierarchical", |(name, _)| name)
}

/// Returns the number after a prefix, if it is above 0.
fn size(part: &str, prefix: &str) -> Option<usize> {
    let size = part.strip_prefix(prefix)?.parse::<usize>().ok()?;
    (size > 0).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_read_as_it_is_written() {
        for layout in Layout::standard() {
            assert_eq!(layout.to_string().parse(), Ok(layout));
        }
        assert_eq!(Layout::pipelines().len(), 13);
        for kind in ScheduleKind::ALL {
            let mut pipelines = Layout::pipelines().into_iter();
            let has = pipelines.any(|layout| layout.parallel.schedule == Some(kind.into()));
            assert!(has, "{kind}");
        }
        assert_eq!(Layout::sharded().len(), 12);
        assert_eq!(Layout::contexts().len(), 18);
        assert_eq!(Layout::overlaps().len(), 10);
        let more = [
            Layout::pipelines(),
            Layout::sharded(),
            Layout::contexts(),
            Layout::overlaps(),
        ];
        for layout in more.concat() {
            assert_eq!(layout.to_string().parse(), Ok(layout));
        }
        for text in [
            "tp2-pp2-dp1-mb1/zb-h1",
            "tp1-pp4-dp2-mb2/interleaved:6/v2",
            "tp2-sp-ep2-etp1-dp2",
            "tp1-cp4-ring-striped-dp1",
            "tp1-cp4-usp2-contiguous-dp1",
            "tp2-sp-cp2-alltoall-ep2-dp1-z1",
            "tp1-cp2-perdocument-dp1",
            "tp2-sp-cp2-hybrid8-dp2-mb1",
            "tp1-ep4-dp4-z1-hsdp2-node2",
            "tp2-sp-ep2-epoverlap-pp2-dp2-mb1/interleaved",
        ] {
            assert_eq!(text.parse::<Layout>().unwrap().to_string(), text);
        }
        assert_eq!(
            "sp-tp2".parse::<Layout>().unwrap().to_string(),
            "tp2-sp-dp1"
        );
    }

    #[test]
    fn the_invalid_part_is_named() {
        for (text, part) in [
            ("tp2-cp0", "cp0"),
            ("tp0", "tp0"),
            ("", ""),
            ("tp2-dpx", "dpx"),
            ("dp4-z4", "z4"),
            ("pp2-mb1/own.csv", "own.csv"),
        ] {
            let error = text.parse::<Layout>().unwrap_err();
            assert_eq!(
                (&error.part[..], error.fault),
                (part, LayoutPartError::Unknown)
            );
        }
    }

    #[test]
    fn a_repeated_part_is_refused() {
        for (text, part) in [
            ("tp2-tp4", "tp4"),
            ("tp2-tp2", "tp2"),
            ("dp2-tp2-dp1", "dp1"),
            ("tp2-sp-sp", "sp"),
            ("tp2-sp-tpring-tpbulk4", "tpbulk4"),
            ("pp2-pp2-mb1", "pp2"),
            ("mb1-mb2", "mb2"),
            ("dp4-z1-z3", "z3"),
            ("dp4-z1-hsdp2-hsdp4", "hsdp4"),
            ("pp2-mb1/1f1b/zb-h1", "zb-h1"),
            ("pp2-mb1/interleaved/v2/v3", "v3"),
        ] {
            let error = text.parse::<Layout>().unwrap_err();
            assert_eq!(
                (&error.part[..], error.fault),
                (part, LayoutPartError::Repeated)
            );
        }
        insta::assert_snapshot!(
            "tp2-tp4".parse::<Layout>().unwrap_err(),
            @"invalid layout \"tp2-tp4\": \"tp4\" repeats an earlier part: expected each part at most once, as in \
              tp2-sp-dp2"
        );
    }
}
