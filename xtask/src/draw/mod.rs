//! Draws recipes and layouts, for `soak` and `fuzz-layouts`.
//!
//! A draw begins with a layout of two to eight ranks and a small model whose sizes fit this layout. A few unusual
//! settings follow. Each unusual setting is a [`Feature`], which changes the draft only if the layout and the model
//! allow it.

mod data;
mod experts;
mod layout;
mod memory;
mod model;
mod optimizer;
mod random;
mod settings;
mod sharding;
mod train;
mod verified;

pub use data::{TEXT, TOKENS, write_text};
pub use layout::Axes;
pub use random::Random;
pub use settings::Settings;
pub use verified::is_for_verify_alone;

/// A recipe that is being drawn.
pub struct Draft<'a> {
    pub random: &'a mut Random,
    pub settings: Settings,
    pub axes: Axes,
    /// Tokens per sample.
    pub sequence: usize,
    pub layers: usize,
    pub heads: usize,
    pub hidden: usize,
    /// Micro-batches per step on each data rank.
    pub micro_batches: usize,
    pub micro_batch_size: usize,
    /// Whether to combine settings that conflict. The program must either refuse such a recipe with an error or
    /// compute it correctly.
    pub is_bold: bool,
}

/// An unusual setting. Returns `true` if the draft allows the setting. Otherwise the draft is unchanged.
pub type Feature = fn(&mut Draft<'_>) -> bool;

/// The maximum number of unusual settings in a recipe.
const MAX_FEATURES: usize = 9;

/// Draws a recipe.
pub fn recipe(random: &mut Random) -> Settings {
    let axes = Axes::draw(random);
    let mut draft = Draft::new(random, axes);
    layout::base(&mut draft);
    model::base(&mut draft);
    sharding::base(&mut draft);
    train::base(&mut draft);
    data::base(&mut draft);
    let lists = [
        layout::FEATURES,
        model::FEATURES,
        experts::FEATURES,
        sharding::FEATURES,
        train::FEATURES,
        optimizer::FEATURES,
        memory::FEATURES,
        data::FEATURES,
    ];
    // Many settings require experts.
    if draft.settings.has("model.moe") {
        for _ in 0..draft.random.below(3) {
            draft.apply_one(experts::FEATURES);
        }
    }
    for _ in 0..draft.random.within((1, MAX_FEATURES)) {
        let list = draft.random.one_of(&lists);
        draft.apply_one(list);
    }
    if draft.random.once_in(8) {
        draft.apply_one(verified::FEATURES);
    }
    draft.finish();
    draft.settings
}

impl Draft<'_> {
    fn apply_one(&mut self, features: &[Feature]) {
        let start = self.random.below(features.len());
        let mut all = features.iter().cycle().skip(start).take(features.len());
        all.find(|feature| feature(self));
    }

    fn set(&mut self, key: &str, value: impl std::fmt::Display) -> bool {
        self.settings.set(key, value);
        true
    }

    fn set_text(&mut self, key: &str, value: &str) -> bool {
        self.settings.set_text(key, value);
        true
    }

    fn has(&self, key: &str) -> bool {
        self.settings.has(key)
    }

    fn is(&self, key: &str, value: &str) -> bool {
        self.settings.is(key, value)
    }

    /// Returns whether one of these keys or tables is set. The program refuses these keys together with the setting
    /// that is drawn.
    fn conflicts(&self, keys: &[&str]) -> bool {
        !self.is_bold && keys.iter().any(|key| self.has(key))
    }

    /// Returns whether samples consist of several documents.
    fn is_packed(&self) -> bool {
        self.has("data.packing") || self.has("data.reset_attention")
    }

    /// Sets the keys that depend on several settings.
    fn finish(&mut self) {
        let batch = self.axes.data * self.micro_batches * self.micro_batch_size;
        self.set("train.global_batch_size", batch);
        self.set("train.micro_batch_size", self.micro_batch_size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_can_be_repeated_and_others_differ() {
        let draw = |number| recipe(&mut Random::new(1, number)).to_toml();
        assert_eq!(draw(3), draw(3));
        let drawn: std::collections::BTreeSet<_> = (0..200).map(draw).collect();
        assert!(drawn.len() > 190, "{}", drawn.len());
    }
}
