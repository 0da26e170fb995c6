//! Makes a failing recipe smaller while it fails in the same way.

use crate::draw::{Settings, TEXT};

/// Keys that every case needs. Their values shrink, but the keys are not dropped.
const KEPT: [&str; 13] = [
    "data.path",
    "data.files",
    "data_parallel.precision",
    "model.context",
    "model.family",
    "model.heads",
    "model.hidden",
    "model.layers",
    "sample.tokens",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.steps",
    "train.warmup_steps",
];

/// Returns whether a key is in every case.
pub fn is_kept(key: &str) -> bool {
    KEPT.contains(&key)
}

/// Tables that are dropped as a whole, before their keys.
const TABLES: [&str; 16] = [
    "lora",
    "kernels",
    "memory",
    "memory.recompute",
    "memory.offload",
    "model.moe",
    "model.moe.groups",
    "model.moe.capacity",
    "model.mtp",
    "model.mla",
    "train.optimizer",
    "train.ema",
    "train.loss_scale",
    "train.qk_clip",
    "train.skip_spikes",
    "sample",
];

/// Sizes that are made smaller, with the smallest value of each.
const SIZES: [(&str, usize); 14] = [
    ("parallel.pipeline", 1),
    ("parallel.data", 1),
    ("parallel.context", 1),
    ("parallel.tensor", 1),
    ("parallel.expert", 1),
    ("train.global_batch_size", 1),
    ("train.micro_batch_size", 1),
    ("train.steps", 1),
    ("model.layers", 1),
    ("model.context", 4),
    ("model.moe.experts", 2),
    ("model.moe.experts_per_token", 1),
    ("model.heads", 1),
    ("model.hidden", 8),
];

/// Shrinks a recipe. `fails` runs a smaller recipe, and `may_go_on` limits the time.
pub fn shrink(
    settings: &Settings,
    mut may_go_on: impl FnMut() -> bool,
    mut fails: impl FnMut(&Settings) -> bool,
) -> Settings {
    let mut smallest = settings.clone();
    loop {
        let before = smallest.clone();
        let mut place = 0;
        // A success changes the candidates. The candidates before this place have been tried.
        while let Some(next) = smaller(&smallest).into_iter().nth(place) {
            if !may_go_on() {
                return smallest;
            }
            if fails(&next) {
                smallest = next;
            } else {
                place += 1;
            }
        }
        if smallest == before {
            return smallest;
        }
    }
}

/// Returns the recipes that are smaller by one change. Recipes that drop the largest part come first.
fn smaller(settings: &Settings) -> Vec<Settings> {
    let mut all = vec![];
    let mut add = |change: &dyn Fn(&mut Settings)| {
        let mut next = settings.clone();
        change(&mut next);
        if next != *settings {
            all.push(next);
        }
    };
    for table in TABLES {
        add(&|next| {
            next.remove(table);
            if table == "sample" {
                next.set("sample.tokens", 0);
            }
        });
    }
    add(&|next| {
        next.remove("data");
        next.set_text("data.path", TEXT);
    });
    for family in ["gpt2", "llama"] {
        // Without this condition each family would count as smaller than the other family.
        if settings.get("model.family") != Some("\"gpt2\"") {
            add(&|next| next.set_text("model.family", family));
        }
    }
    for (key, least) in SIZES {
        let Some(size) = settings.number(key).filter(|size| *size > least) else {
            continue;
        };
        for less in [least, size / 2, size - 1] {
            add(&|next| {
                next.set(key, less.max(least));
                if key == "parallel.data" {
                    scale_batch(next, less.max(least), size);
                }
            });
        }
    }
    for key in settings.keys().filter(|key| !is_kept(key)) {
        add(&|next| next.remove(key));
    }
    all
}

/// Keeps the number of micro-batches per data rank.
fn scale_batch(settings: &mut Settings, ranks: usize, before: usize) {
    if let Some(samples) = settings.number("train.global_batch_size") {
        settings.set("train.global_batch_size", samples / before * ranks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::{Random, recipe};

    #[test]
    fn a_recipe_shrinks_to_what_its_fault_needs() {
        let mut settings = recipe(&mut Random::new(1, 1));
        settings.set("parallel.data", 4);
        settings.set("train.global_batch_size", 16);
        settings.set("model.dropout", 0.2);
        settings.set("train.clip", 0.05);
        let mut runs = 0;
        let smallest = shrink(
            &settings,
            || true,
            |next| {
                runs += 1;
                let is_split = next.number("parallel.data").is_some_and(|ranks| ranks >= 2);
                is_split && next.has("model.dropout")
            },
        );
        assert!(runs < 400, "{runs}");
        assert_eq!(smallest.number("parallel.data"), Some(2));
        assert_eq!(smallest.number("model.layers"), Some(1));
        let others = ["parallel.data", "model.dropout"];
        let left: Vec<_> = smallest
            .keys()
            .filter(|key| !KEPT.contains(key) && !others.contains(key))
            .collect();
        assert_eq!(left, Vec::<&str>::new());
    }

    #[test]
    fn shrinking_stops_when_its_time_is_over() {
        let settings = recipe(&mut Random::new(1, 2));
        assert_eq!(shrink(&settings, || false, |_| true), settings);
    }
}
