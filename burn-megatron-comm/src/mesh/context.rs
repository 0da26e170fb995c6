//! The settings of context parallelism: the split of a sequence, and the exchange of keys and values for attention.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

use super::split::multiples_around;

/// The method that distributes the tokens of a sequence over the ranks of the context axis.
///
/// With causal attention, the cost of a token is proportional to the number of tokens before it. The zigzag split gives
/// all ranks the same number of query-key pairs. With the contiguous split, the last rank has up to twice the mean
/// number of query-key pairs.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
#[derive(
    JsonSchema, strum::Display, strum::EnumString, strum::IntoStaticStr, strum::VariantArray,
)]
#[strum(
    serialize_all = "kebab-case",
    parse_err_ty = ParseContextError,
    parse_err_fn = ParseContextError::split
)]
pub enum ContextSplit {
    /// The sequence is divided into `2 * context` chunks. Rank `r` has the chunks `r` and `2 * context - 1 - r`.
    #[default]
    Zigzag,
    /// The sequence is divided into `context` chunks. Rank `r` has chunk `r`.
    Contiguous,
    /// Rank `r` has the tokens `r`, `r + context`, `r + 2 * context`, and so on.
    Striped,
    /// Each packed document has its own zigzag split. It is padded to a multiple of `2 * context` tokens.
    ZigzagPerDocument,
}

/// The method that exchanges keys and values between the ranks of a context group for attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(
    JsonSchema, strum::Display, strum::EnumString, strum::IntoStaticStr, strum::VariantArray,
)]
#[strum(
    serialize_all = "kebab-case",
    parse_err_ty = ParseContextError,
    parse_err_fn = ParseContextError::exchange
)]
pub enum ContextExchange {
    /// The keys and values are sent around a ring of ranks. Each rank computes attention to one block of keys while it
    /// sends the block to the next rank (Liu et al., "Ring Attention", arXiv:2310.01889).
    Ring,
    /// Each rank gathers the keys and values of all ranks (Llama 3, arXiv:2407.21783).
    AllGather,
    /// Each rank computes the attention of some heads for the complete sequence (DeepSpeed-Ulysses, arXiv:2309.14509).
    AllToAll,
    /// All-to-all in groups of `context_inner` adjacent ranks, and ring attention between the groups (USP,
    /// arXiv:2405.07719).
    Hierarchical,
}

/// The error for a length that is not a multiple of the divisor of a split.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} of {length} tokens cannot be split over context = {ranks} ranks{sequence_parallel} by the {split} split: \
     expected a multiple of {divisor}, such as {}",
    multiples_around(*length, *divisor)
)]
pub struct ContextSplitError {
    /// The name of the object that cannot be split, such as a sequence.
    pub what: &'static str,
    /// The length in tokens.
    pub length: usize,
    /// The size of the context axis.
    pub ranks: usize,
    /// A text that describes the number of tensor ranks that share each part. It is empty without sequence parallelism.
    pub sequence_parallel: String,
    /// The method of the split.
    pub split: ContextSplit,
    /// The required divisor of the length.
    pub divisor: usize,
}

impl ContextSplit {
    /// The list of all splits.
    pub const ALL: [Self; 4] = *Self::VARIANTS.as_array().unwrap();

    /// Returns the name that is used in recipes.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the required divisor of every sequence length.
    ///
    /// `tensor` is the number of ranks over which sequence parallelism splits each part again. Pass 1 without sequence
    /// parallelism, and for a document of [`ZigzagPerDocument`](Self::ZigzagPerDocument).
    pub fn divisor(self, ranks: usize, tensor: usize) -> usize {
        match self {
            _ if ranks == 1 => tensor,
            // The two chunks of a rank are split over the tensor ranks together.
            Self::Zigzag | Self::ZigzagPerDocument if tensor % 2 == 1 => 2 * ranks * tensor,
            _ => ranks * tensor,
        }
    }

    /// Checks that the length of a sequence can be split.
    ///
    /// # Errors
    ///
    /// [`ContextSplitError`] if the length is not a multiple of [`divisor`](Self::divisor).
    pub fn check(
        self,
        length: usize,
        ranks: usize,
        tensor: usize,
    ) -> Result<(), ContextSplitError> {
        self.check_part("a sequence", length, ranks, tensor)
    }

    fn check_part(
        self,
        what: &'static str,
        length: usize,
        ranks: usize,
        tensor: usize,
    ) -> Result<(), ContextSplitError> {
        let divisor = self.divisor(ranks, tensor);
        if length.is_multiple_of(divisor) {
            return Ok(());
        }
        let sequence_parallel = match tensor {
            1 => String::new(),
            _ => format!(" and {tensor} tensor ranks each"),
        };
        Err(ContextSplitError {
            what,
            length,
            ranks,
            sequence_parallel,
            split: self,
            divisor,
        })
    }

    /// Returns the indices of the tokens of a sequence that are assigned to rank `rank` of `ranks`, in ascending order.
    /// `documents` contains the end position of each document in the sequence. The last end is the length of the
    /// sequence.
    ///
    /// # Errors
    ///
    /// [`ContextSplitError`] if the sequence, or a document with [`ZigzagPerDocument`](Self::ZigzagPerDocument), cannot
    /// be divided.
    pub fn tokens(
        self,
        documents: &[usize],
        rank: usize,
        ranks: usize,
    ) -> Result<Vec<usize>, ContextSplitError> {
        let length = documents.last().copied().unwrap_or(0);
        if self != Self::ZigzagPerDocument {
            self.check_part("a sequence", length, ranks, 1)?;
            return Ok(self.part(0..length, rank, ranks));
        }
        let (mut tokens, mut start) = (vec![], 0);
        for &end in documents {
            self.check_part("a document", end - start, ranks, 1)?;
            tokens.extend(self.part(start..end, rank, ranks));
            start = end;
        }
        Ok(tokens)
    }

    /// Returns the tokens of one rank in a range that can be divided.
    fn part(self, of: Range<usize>, rank: usize, ranks: usize) -> Vec<usize> {
        let chunk = |number: usize, chunks: usize| {
            let length = of.len() / chunks;
            let start = of.start + number * length;
            start..start + length
        };
        match self {
            // One rank can have any length.
            _ if ranks == 1 => of.collect(),
            Self::Contiguous => chunk(rank, ranks).collect(),
            Self::Striped => of.skip(rank).step_by(ranks).collect(),
            Self::Zigzag | Self::ZigzagPerDocument => {
                let first = chunk(rank, 2 * ranks);
                first
                    .chain(chunk(2 * ranks - 1 - rank, 2 * ranks))
                    .collect()
            }
        }
    }
}

impl ContextExchange {
    /// The list of all context exchanges.
    pub const ALL: [Self; 4] = *Self::VARIANTS.as_array().unwrap();

    /// Returns the name that is used in recipes.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The error for a string that is not the name of a context split or a context exchange.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid context {setting} \"{given}\": expected {fits}")]
pub struct ParseContextError {
    setting: &'static str,
    given: String,
    fits: String,
}

impl ParseContextError {
    fn new(
        setting: &'static str,
        given: &str,
        fits: impl IntoIterator<Item = &'static str>,
    ) -> Self {
        Self {
            setting,
            given: given.into(),
            fits: fits.into_iter().collect::<Vec<_>>().join(", "),
        }
    }

    fn split(given: &str) -> Self {
        Self::new("split", given, ContextSplit::ALL.map(ContextSplit::name))
    }

    fn exchange(given: &str) -> Self {
        Self::new(
            "exchange",
            given,
            ContextExchange::ALL.map(ContextExchange::name),
        )
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn tokens(split: ContextSplit, documents: &[usize], ranks: usize) -> Vec<Vec<usize>> {
        let of = |rank| split.tokens(documents, rank, ranks).unwrap();
        (0..ranks).map(of).collect()
    }

    #[test]
    fn a_zigzag_has_the_known_tokens() {
        let zigzag = |ranks| tokens(ContextSplit::Zigzag, &[16], ranks);
        assert_eq!(
            zigzag(2),
            [vec![0, 1, 2, 3, 12, 13, 14, 15], (4..12).collect()]
        );
        let four = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]];
        assert_eq!(zigzag(4), four.map(Vec::from));
        assert_eq!(zigzag(1), [(0..16).collect::<Vec<_>>()]);
    }

    #[test]
    fn a_zigzag_per_document_has_the_known_tokens() {
        let split =
            |documents: &[usize], ranks| tokens(ContextSplit::ZigzagPerDocument, documents, ranks);
        assert_eq!(
            split(&[8, 12], 2),
            [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
        );
        let four = [
            [0, 7, 8, 15, 16, 23, 24, 25, 38, 39],
            [1, 6, 9, 14, 17, 22, 26, 27, 36, 37],
            [2, 5, 10, 13, 18, 21, 28, 29, 34, 35],
            [3, 4, 11, 12, 19, 20, 30, 31, 32, 33],
        ];
        assert_eq!(split(&[8, 16, 24, 40], 4), four);
    }

    #[test]
    fn each_token_is_on_one_rank_in_ascending_order() {
        for split in ContextSplit::ALL {
            for ranks in [1, 2, 3, 4] {
                let length = 24 * ranks;
                let parts = tokens(split, &[8 * ranks, 12 * ranks, length], ranks);
                let mut all: Vec<_> = parts.concat();
                for part in &parts {
                    assert!(part.is_sorted() && part.len() == length / ranks, "{split}");
                }
                all.sort_unstable();
                assert_eq!(all, (0..length).collect::<Vec<_>>(), "{split}");
            }
        }
    }

    #[test]
    fn a_zigzag_gives_all_ranks_the_same_pairs() {
        let pairs = |split, ranks| {
            let of = |part: &Vec<usize>| part.iter().map(|token| token + 1).sum::<usize>();
            tokens(split, &[64], ranks)
                .iter()
                .map(of)
                .collect::<Vec<_>>()
        };
        for ranks in [2, 4, 8] {
            assert_eq!(
                pairs(ContextSplit::Zigzag, ranks),
                vec![64 * 65 / 2 / ranks; ranks]
            );
        }
        assert_eq!(pairs(ContextSplit::Contiguous, 2), [528, 1552]);
        assert_eq!(pairs(ContextSplit::Striped, 2), [1024, 1056]);
    }

    #[test]
    fn a_length_that_does_not_fit_is_refused_with_those_that_do() {
        let refused = |split: ContextSplit, length, tensor| {
            split.check(length, 4, tensor).unwrap_err().to_string()
        };
        assert_snapshot!(
            refused(ContextSplit::Zigzag, 20, 1),
            @"a sequence of 20 tokens cannot be split over context = 4 ranks by the zigzag split: expected a multiple of \
              8, such as 16 or 24"
        );
        assert_snapshot!(
            refused(ContextSplit::Striped, 6, 2),
            @"a sequence of 6 tokens cannot be split over context = 4 ranks and 2 tensor ranks each by the striped \
              split: expected a multiple of 8, such as 8"
        );
        assert_eq!(ContextSplit::Zigzag.divisor(4, 2), 8);
        assert_eq!(ContextSplit::Zigzag.divisor(4, 3), 24);
        assert_eq!(ContextSplit::Contiguous.divisor(4, 3), 12);
        assert_eq!(ContextSplit::Zigzag.divisor(1, 3), 3);
        let documents = ContextSplit::ZigzagPerDocument.tokens(&[4, 9], 0, 2);
        assert_snapshot!(
            documents.unwrap_err(),
            @"a document of 5 tokens cannot be split over context = 2 ranks by the zigzag-per-document split: expected \
              a multiple of 4, such as 4 or 8"
        );
    }

    #[test]
    fn names_are_read_back() {
        for split in ContextSplit::ALL {
            assert_eq!(split.to_string().parse(), Ok(split));
        }
        for exchange in ContextExchange::ALL {
            assert_eq!(exchange.to_string().parse(), Ok(exchange));
        }
        assert_snapshot!(
            "circle".parse::<ContextExchange>().unwrap_err(),
            @"invalid context exchange \"circle\": expected ring, all-gather, all-to-all, hierarchical"
        );
    }
}
