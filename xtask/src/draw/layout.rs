//! Draws the parallel layout: the sizes of the axes, and `[parallel]`.

use super::{Draft, Feature, Random, Settings};

/// The maximum number of ranks. Ranks are threads.
const MAX_RANKS: usize = 8;

/// The sizes of the axes of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axes {
    pub tensor: usize,
    pub context: usize,
    pub data: usize,
    pub pipeline: usize,
    /// The number of stages per pipeline rank.
    pub stages: usize,
}

impl Axes {
    /// Draws sizes whose product is 2 to [`MAX_RANKS`].
    pub fn draw(random: &mut Random) -> Self {
        loop {
            let axes = Self {
                tensor: random.one_of(&[1, 1, 2, 2, 4]),
                context: random.one_of(&[1, 1, 1, 2, 2, 4]),
                data: random.one_of(&[1, 1, 2, 2, 4]),
                pipeline: random.one_of(&[1, 1, 1, 2, 2, 4]),
                stages: 1,
            };
            if (2..=MAX_RANKS).contains(&axes.ranks()) {
                return axes;
            }
        }
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.tensor * self.context * self.data * self.pipeline
    }

    /// Returns the number of ranks over which gradients are summed.
    pub fn sharing(&self) -> usize {
        self.context * self.data
    }
}

const SCHEDULES: [&str; 9] = [
    "1f1b",
    "gpipe",
    "eager-1f1b",
    "interleaved",
    "interleaved",
    "interleaved:N",
    "zb-h1",
    "zb-v",
    "dualpipe-v",
];

impl<'a> Draft<'a> {
    /// Draws the sizes that depend on the layout.
    pub fn new(random: &'a mut Random, mut axes: Axes) -> Self {
        let mut settings = Settings::default();
        let ranks = axes.pipeline;
        let (mut layers, mut micro_batches) = (random.within((1, 3)), random.within((1, 3)));
        if ranks > 1 {
            let schedule = random.one_of(&SCHEDULES);
            let is_v = matches!(schedule, "zb-v" | "dualpipe-v");
            if is_v || schedule.starts_with("interleaved") {
                axes.stages = 2;
            }
            let all = ranks * axes.stages;
            layers = all * if all > 2 { 1 } else { random.within((1, 2)) };
            micro_batches = match schedule {
                _ if is_v => 2 * ranks,
                name if name.starts_with("interleaved") => ranks * random.within((1, 2)),
                _ => random.within((1, 2 * ranks)),
            };
            let group = ranks.max(micro_batches / 2);
            settings.set_text(
                "parallel.schedule",
                &schedule.replace('N', &group.to_string()),
            );
            if schedule.starts_with("interleaved") && random.once_in(2) {
                settings.set("parallel.virtual_stages", 2);
            }
        }
        let heads = random.one_of(&[4, 4, 8]).max(axes.tensor * axes.context);
        let hidden = random.one_of(&[16, 32]).max(2 * heads);
        Self {
            settings,
            axes,
            sequence: random.one_of(&[16, 32, 32, 64]),
            layers,
            heads,
            hidden,
            micro_batches,
            micro_batch_size: random.one_of(&[1, 1, 2]),
            is_bold: random.once_in(5),
            random,
        }
    }
}

/// Draws the settings of the axes.
pub fn base(draft: &mut Draft<'_>) {
    let axes = draft.axes;
    for (key, size) in [
        ("parallel.tensor", axes.tensor),
        ("parallel.context", axes.context),
        ("parallel.data", axes.data),
        ("parallel.pipeline", axes.pipeline),
    ] {
        if size > 1 {
            draft.set(key, size);
        }
    }
    if axes.tensor > 1 && draft.random.once_in(2) {
        draft.set("parallel.sequence_parallel", true);
    }
    if axes.context > 1 {
        context(draft);
    }
}

fn context(draft: &mut Draft<'_>) {
    let splits = [
        "zigzag",
        "zigzag",
        "contiguous",
        "striped",
        "zigzag-per-document",
    ];
    let split = draft.random.one_of(&splits);
    if split != "zigzag" {
        draft.set_text("parallel.context_split", split);
    }
    match draft.random.below(5) {
        0 => {}
        1 => drop(draft.set_text("parallel.context_exchange", "ring")),
        2 => drop(draft.set_text("parallel.context_exchange", "all-gather")),
        3 => drop(draft.set_text("parallel.context_exchange", "all-to-all")),
        _ if draft.axes.context == 4 => {
            draft.set_text("parallel.context_exchange", "hierarchical");
            draft.set("parallel.context_inner", 2);
        }
        _ => {}
    }
}

pub const FEATURES: &[Feature] = &[
    sequence_parallel,
    tp_comm_overlap,
    defer_embedding_wgrad,
    receives_ahead,
    split,
    order,
    ranks_per_node,
    hybrid,
];

fn sequence_parallel(draft: &mut Draft<'_>) -> bool {
    draft.axes.tensor > 1 && draft.set("parallel.sequence_parallel", true)
}

fn tp_comm_overlap(draft: &mut Draft<'_>) -> bool {
    if !sequence_parallel(draft) {
        return false;
    }
    let method = draft.random.one_of(&["ring", "bulk"]);
    if draft.random.once_in(2) {
        draft.set("parallel.tp_comm_overlap_num_splits", 2);
    }
    draft.set_text("parallel.tp_comm_overlap", method)
}

fn defer_embedding_wgrad(draft: &mut Draft<'_>) -> bool {
    let splits_backwards = ["zb-h1", "zb-v", "dualpipe-v"];
    let splits_backwards = splits_backwards
        .iter()
        .any(|it| draft.is("parallel.schedule", it));
    if draft.axes.pipeline == 1 || splits_backwards || draft.conflicts(&["lora"]) {
        return false;
    }
    let most = draft.random.below(3);
    draft.set("parallel.defer_embedding_wgrad", most)
}

fn receives_ahead(draft: &mut Draft<'_>) -> bool {
    let ahead = draft.random.one_of(&[0, 2, 3]);
    draft.axes.pipeline > 1 && draft.set("parallel.receives_ahead", ahead)
}

/// Draws uneven stages: the first or the last stage has one more layer.
fn split(draft: &mut Draft<'_>) -> bool {
    let stages = draft.axes.pipeline * draft.axes.stages;
    if draft.axes.pipeline == 1 || draft.has("model.layer_windows") {
        return false;
    }
    let per_stage = draft.layers / stages;
    let wide = per_stage + 1;
    draft.layers += 1;
    draft.set("model.layers", draft.layers);
    let value = match draft.random.below(3) {
        0 => format!("{{ ends = {{ first = {wide} }} }}"),
        1 => format!("{{ ends = {{ last = {wide} }} }}"),
        _ => {
            let even = format!("|{}", "t".repeat(per_stage)).repeat(stages - 1);
            format!("{{ layout = \"Et*{wide}{even}L\" }}")
        }
    };
    draft.set("parallel.split", value)
}

fn order(draft: &mut Draft<'_>) -> bool {
    let orders = ["cp-tp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-dp-cp-ep-tp"];
    let order = draft.random.one_of(&orders);
    draft.set_text("parallel.order", order)
}

fn ranks_per_node(draft: &mut Draft<'_>) -> bool {
    let ranks = draft.axes.ranks();
    let node = draft.random.one_of(&[1, 2, 4]);
    let has_nodes = ranks.is_multiple_of(node) && node < ranks;
    let is_used =
        draft.is("model.moe.dispatcher", "flex") || draft.has("data_parallel.hierarchical_reduce");
    has_nodes && is_used && draft.set("parallel.ranks_per_node", node)
}

/// Draws groups of ranks for documents of different length.
fn hybrid(draft: &mut Draft<'_>) -> bool {
    let axes = draft.axes;
    let others = [
        "model.moe",
        "model.mla",
        "train.check_replay_every",
        "kernels",
        "model.attention_dropout",
        "model.attention_soft_cap",
        "parallel.context_split",
    ];
    let is_refused = axes.pipeline > 1
        || axes.sharing() == 1
        || draft.conflicts(&others)
        || draft.is("model.family", "gemma2")
        || draft.is("parallel.context_exchange", "all-to-all")
        || draft.is("parallel.context_exchange", "hierarchical");
    if is_refused {
        return false;
    }
    draft.micro_batch_size = 1;
    let least = draft.sequence.div_ceil(axes.sharing());
    let most = least * draft.random.within((1, 2));
    draft.set("parallel.max_seqlen_per_dp_cp_rank", most);
    draft.set("parallel.hybrid_context_parallel", true)
}
