//! Draws the sharding over the ranks of the data axis: `[data_parallel]`.

use super::{Draft, Feature};

impl Draft<'_> {
    fn zero_stage(&self) -> usize {
        self.settings
            .number("data_parallel.zero_stage")
            .unwrap_or(0)
    }

    pub fn shards(&self) -> bool {
        matches!(self.zero_stage(), 1 | 2)
    }
}

/// Draws the ZeRO stage. The type is always f64, so that only the order of sums differs.
pub fn base(draft: &mut Draft<'_>) {
    draft.set_text("data_parallel.precision", "f64");
    let stage = draft.random.one_of(&[0, 0, 1, 2, 3]);
    if draft.axes.data > 1 && stage > 0 {
        draft.set("data_parallel.zero_stage", stage);
    }
}

pub const FEATURES: &[Feature] = &[
    hsdp,
    hierarchical_reduce,
    bucket_size,
    bucket_size,
    pad_buckets,
    overlap_grad_reduce,
    overlap_param_gather,
    keep_gathered,
    check_gradients,
    gradient_limit,
];

fn hsdp(draft: &mut Draft<'_>) -> bool {
    let ranks = draft.axes.sharing();
    let group = draft.random.one_of(&[1, 2, 4]);
    let fits = group <= ranks
        && ranks.is_multiple_of(group)
        && !draft.has("data_parallel.overlap_param_gather");
    draft.zero_stage() > 0 && fits && draft.set("data_parallel.hsdp", group)
}

fn hierarchical_reduce(draft: &mut Draft<'_>) -> bool {
    let ranks = draft.axes.ranks();
    let node = draft.random.one_of(&[2, 4]);
    if draft.zero_stage() > 0
        || draft.axes.sharing() == 1
        || node >= ranks
        || !ranks.is_multiple_of(node)
    {
        return false;
    }
    draft.set("parallel.ranks_per_node", node);
    draft.set("data_parallel.hierarchical_reduce", true)
}

fn bucket_size(draft: &mut Draft<'_>) -> bool {
    let size = draft.random.one_of(&[1, 100, 700, 3000]);
    draft.set("data_parallel.bucket_size", size)
}

fn pad_buckets(draft: &mut Draft<'_>) -> bool {
    draft.zero_stage() > 0 && draft.set("data_parallel.pad_buckets", true)
}

fn overlap_grad_reduce(draft: &mut Draft<'_>) -> bool {
    draft.axes.sharing() > 1 && draft.set("data_parallel.overlap_grad_reduce", false)
}

fn overlap_param_gather(draft: &mut Draft<'_>) -> bool {
    draft.shards()
        && !draft.has("data_parallel.hsdp")
        && draft.set("data_parallel.overlap_param_gather", true)
}

fn keep_gathered(draft: &mut Draft<'_>) -> bool {
    draft.zero_stage() == 3 && draft.set("data_parallel.keep_gathered", true)
}

fn check_gradients(draft: &mut Draft<'_>) -> bool {
    !draft.has("data_parallel.gradient_limit") && draft.set("data_parallel.check_gradients", false)
}

fn gradient_limit(draft: &mut Draft<'_>) -> bool {
    !draft.has("data_parallel.check_gradients") && draft.set("data_parallel.gradient_limit", "1e12")
}
