//! The races of one block of pages, every interleaving. The block's state word, page words,
//! descriptors, split and merge are the real ones, on two pages instead of 512; the other steps are
//! the manager's, in the same order.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p lacuna-frames --test loom_huge --release`
#![cfg(loom)]

use lacuna_addr::Pfn;
use lacuna_frames::{
    BlockDesc, BlockNo, BlockWord, Desc, Dirt, FrameBlockState, FrameState, Marked, PageBlockState,
    PageNo, PageState, PageWord, Parts,
};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

fn frame(index: u32) -> Pfn {
    Pfn::new(index)
}

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

/// A block of two pages, on which the real code for splits and merges runs, and two more frames for
/// pages outside the block.
struct Block {
    block_word: BlockWord,
    words: [PageWord; 2],
    desc: BlockDesc,
    frames: [Desc; 2],
    /// The content of the block's frames, and of the other two.
    bytes: [AtomicU64; 2],
    elsewhere: [AtomicU64; 2],
    collapsing: loom::sync::Mutex<()>,
}

const FIRST: PageNo = PageNo::new(1024);
const BLOCK_NO: BlockNo = BlockNo::new(3);

/// What a fault on a page has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    Block,
    Frame(Pfn),
}

impl Block {
    fn new() -> Self {
        let number = |_| AtomicU64::new(0);
        Self {
            block_word: BlockWord::default(),
            words: [(); 2].map(|()| PageWord::new()),
            desc: BlockDesc::default(),
            frames: [(); 2].map(|()| Desc::default()),
            bytes: [0, 1].map(number),
            elsewhere: [0, 1].map(number),
            collapsing: loom::sync::Mutex::new(()),
        }
    }

    fn parts(&self) -> Parts<'_> {
        Parts {
            block_word: &self.block_word,
            words: &self.words,
            number: BLOCK_NO,
            desc: &self.desc,
            frames: &self.frames,
        }
    }

    /// `Core::fill_block` after the zeroing.
    fn first_touch(&self) -> Result<(), PageBlockState> {
        self.desc.prepare(FIRST, Dirt::Clean);
        let whole = PageBlockState::Compound { block: BLOCK_NO };
        self.block_word.change(PageBlockState::Untouched, whole)?;
        self.desc.publish();
        Ok(())
    }

    /// `Core::resolve` for a write to page `index`.
    fn fault(&self, index: usize) -> At {
        loop {
            match self.words[index].load() {
                PageState::Resident { frame, .. } => {
                    self.mark(index, frame);
                    return At::Frame(frame);
                }
                state @ PageState::Evicting { frame, .. } => {
                    let back = state.rescued().unwrap();
                    if self.words[index].change(state, back).is_ok() {
                        self.mark(index, frame);
                        return At::Frame(frame);
                    }
                }
                PageState::Empty | PageState::Collapsed => match self.block_word.load() {
                    PageBlockState::Compound { .. } => {
                        if self.desc.mark_dirty() == Marked::Split {
                            self.frames[index].mark_dirty();
                        }
                        return At::Block;
                    }
                    PageBlockState::Split => drop(self.collapsing.lock().unwrap()),
                    other => panic!("{other:?}"),
                },
                other => panic!("{other:?}"),
            }
        }
    }

    fn mark(&self, index: usize, frame: Pfn) {
        if frame == BLOCK_NO.frame(index) {
            self.frames[index].mark_dirty();
        }
    }

    fn split(&self) {
        if self.desc.isolate() == Some(FIRST) {
            self.parts().split(FIRST);
        }
    }

    /// Whether page `index` counts as written, in any state of the block.
    fn is_dirty(&self, index: usize) -> bool {
        self.frames[index].dirt() == Dirt::Dirty
    }
}

/// Whether or not the fault sees the split, it finds the same frame, and its mark is not lost.
#[test]
fn a_write_while_its_block_is_split() {
    model(|| {
        let block = Arc::new(Block::new());
        block.first_touch().unwrap();
        let splitter = {
            let block = block.clone();
            thread::spawn(move || block.split())
        };
        let at = block.fault(1);
        splitter.join().unwrap();
        assert!(
            at == At::Block || at == At::Frame(BLOCK_NO.frame(1)),
            "{at:?}"
        );
        assert!(block.is_dirty(1), "the write is not forgotten");
        assert_eq!(block.block_word.load(), PageBlockState::Split);
        assert_eq!(block.desc.state(), FrameBlockState::Split);
        for (i, desc) in block.frames.iter().enumerate() {
            assert_eq!(
                (desc.state(), desc.owner()),
                (FrameState::Used, FIRST.plus(i))
            );
        }
    });
}

/// Two marks and a split. The second thread finds the mark set and does not set it again; its write
/// counts nevertheless.
#[test]
fn two_writes_while_their_block_is_split() {
    model(|| {
        let block = Arc::new(Block::new());
        block.first_touch().unwrap();
        let others = [0, 1].map(|index| {
            let block = block.clone();
            thread::spawn(move || match index {
                0 => _ = block.fault(0),
                _ => block.split(),
            })
        });
        block.fault(1);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(block.is_dirty(0) && block.is_dirty(1));
    });
}

/// One of the new pages is evicted at once. The eviction begins only after the split has finished
/// with the page, and takes along the mark that a fault has set.
#[test]
fn a_page_is_evicted_right_after_the_split() {
    model(|| {
        let block = Arc::new(Block::new());
        block.first_touch().unwrap();
        let reclaimer = {
            let block = block.clone();
            thread::spawn(move || {
                let page = block.frames[1].isolate()?;
                assert_eq!(page, FIRST.plus(1));
                assert_eq!(block.block_word.load(), PageBlockState::Split);
                block.words[1].advance(PageState::evicted).unwrap();
                let dirt = block.frames[1].take_dirty();
                let gone = block.words[1].advance(PageState::dropped).is_ok();
                // Dirty pages are written first.
                gone.then_some(dirt)
            })
        };
        assert_eq!(block.desc.mark_dirty(), Marked::Done);
        block.split();
        let dropped = reclaimer.join().unwrap();
        assert!(dropped.is_none_or(|dirt| dirt == Dirt::Dirty));
    });
}

/// A first touch of the whole block and one of a page: one of the two decides the block's state.
#[test]
fn a_first_touch_of_a_page_against_one_of_its_block() {
    model(|| {
        let block = Arc::new(Block::new());
        let huge = {
            let block = block.clone();
            thread::spawn(move || block.first_touch().is_ok())
        };
        let entry = None;
        let small = block
            .block_word
            .change(PageBlockState::Untouched, PageBlockState::Split)
            .is_ok();
        let frame = frame(7);
        let filled = block.block_word.load() == PageBlockState::Split
            && block.words[1]
                .change(PageState::Empty, PageState::Resident { frame, entry })
                .is_ok();
        let huge = huge.join().unwrap();
        assert!(huge != small && small == filled);
    });
}

impl Block {
    /// Both pages are in frames elsewhere, isolated by the thread that will move them here.
    fn apart() -> Arc<Self> {
        let block = Self::new();
        block
            .block_word
            .change(PageBlockState::Untouched, PageBlockState::Split)
            .unwrap();
        for (i, word) in block.words.iter().enumerate() {
            let (frame, entry) = (frame(i as u32), None);
            word.change(PageState::Empty, PageState::Resident { frame, entry })
                .unwrap();
            block.elsewhere[i].store(10, Ordering::Relaxed);
        }
        Arc::new(block)
    }

    /// `Core::collapse_by_copy`.
    fn collapse(&self) -> bool {
        for word in &self.words {
            word.advance(PageState::evicted).unwrap();
        }
        // The pages are unmapped everywhere: from here on only a fault that takes its page back can
        // write.
        for (to, from) in self.bytes.iter().zip(&self.elsewhere) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.desc.prepare(FIRST, Dirt::Clean);
        let from = [0, 1].map(|i| PageState::Evicting {
            frame: frame(i),
            entry: None,
        });
        let collapsed = {
            let _turn = self.collapsing.lock().unwrap();
            self.parts().collapse(&from)
        };
        if collapsed.is_err() {
            for word in &self.words {
                let _ = word.advance(PageState::rescued);
            }
            return false;
        }
        self.desc.publish();
        true
    }
}

/// A write while its block is collapsed by copy. Either the write's fault takes its page back and
/// prevents the collapse, or it finds the copy. It never writes to the old frame.
#[test]
fn a_write_while_its_block_is_collapsed() {
    model(|| {
        let block = Block::apart();
        let writer = {
            let block = block.clone();
            thread::spawn(move || {
                // The page was unmapped. The invalidation sequence, which is not modelled, refuses
                // a fault that resolved before that; the fault starts again.
                if matches!(block.words[1].load(), PageState::Resident { .. }) {
                    return None;
                }
                let at = block.fault(1);
                let bytes = match at {
                    At::Block => &block.bytes,
                    At::Frame(_) => &block.elsewhere,
                };
                assert_eq!(bytes[1].swap(11, Ordering::Relaxed), 10);
                Some(at)
            })
        };
        let collapsed = block.collapse();
        let wrote = writer.join().unwrap();
        let whole = PageBlockState::Compound { block: BLOCK_NO };
        if collapsed {
            assert_eq!(block.block_word.load(), whole);
            assert!(matches!(wrote, None | Some(At::Block)), "{wrote:?}");
            assert_eq!(block.bytes[0].load(Ordering::Relaxed), 10);
        } else {
            assert_eq!(block.block_word.load(), PageBlockState::Split);
            assert_eq!(wrote, Some(At::Frame(frame(1))));
            for (i, word) in block.words.iter().enumerate() {
                let (frame, entry) = (frame(i as u32), None);
                assert_eq!(word.load(), PageState::Resident { frame, entry });
            }
        }
    });
}

/// Pages in their places become a block during a fault, and are split again.
#[test]
fn a_write_while_its_block_is_collapsed_in_place() {
    model(|| {
        let block = Arc::new(Block::new());
        block.first_touch().unwrap();
        block.split();
        let collapser = {
            let block = block.clone();
            thread::spawn(move || {
                let from = [0, 1].map(|i| PageState::Resident {
                    frame: BLOCK_NO.frame(i),
                    entry: None,
                });
                for (i, desc) in block.frames.iter().enumerate() {
                    assert_eq!(desc.isolate(), Some(FIRST.plus(i)));
                }
                block.desc.adopt(FIRST);
                {
                    let _turn = block.collapsing.lock().unwrap();
                    block.parts().collapse(&from).unwrap();
                }
                block
                    .frames
                    .iter()
                    .for_each(|d| d.set_state(FrameState::Free));
                block.desc.publish();
                block.split();
            })
        };
        block.fault(1);
        collapser.join().unwrap();
        assert!(block.is_dirty(1), "the write is not forgotten");
        assert_eq!(block.block_word.load(), PageBlockState::Split);
    });
}
