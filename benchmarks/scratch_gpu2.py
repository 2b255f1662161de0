import torch, time, sys, json, warnings, copy
import penstock
from penstock import Prefetch, UVA, Budget
from penstock.bench.decoder import *
from penstock.bench.measure import *
from penstock.bench.fresh import FreshOnload
from penstock.inventory import take_inventory
from penstock.plan.model import assemble
from penstock.store.pinned import pinned_region, device_view
dev=torch.device("cuda",0)
which=sys.argv[1:]
rate=pinned_region(1<<30); slot=torch.empty(1<<30,dtype=torch.uint8,device=dev)
link_copy=lambda: slot.copy_(rate,non_blocking=True)
def cap(st):
    for _ in range(2): st()
    torch.cuda.synchronize(); g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): o=st()
    g.replay(); torch.cuda.synchronize(); return g,o
with torch.no_grad():
  if "bits" in which:
    cfg=CONFIGS["qwen3-8b"](); cfg.num_hidden_layers=8; cfg.layer_types=cfg.layer_types[:8]
    res=build_model(cfg,dev,dev); res2=build_model(cfg,dev,dev)
    m=build_model(cfg,"cpu",dev); h=penstock.offload(m,Prefetch(1,1,2,params=["layers"]),device=dev)
    for B in (1,8,16,17,32):
        a=DecodeStep(res,res,B,dev); b=DecodeStep(res,res,B,dev); c=DecodeStep(res2,res2,B,dev); d=DecodeStep(m,m,B,dev)
        oa,ob,oc,od=a().clone(),b().clone(),c().clone(),d().clone()
        print("bits",B,"same model twice",torch.equal(oa,ob),"repeat step",torch.equal(oa,a()),"other copy",torch.equal(oa,oc),"offloaded",torch.equal(oa,od),
          "kv equal", [torch.equal(x.keys,y.keys) for x,y in zip(a._cache.layers,b._cache.layers)].count(False),[torch.equal(x.keys,y.keys) for x,y in zip(a._cache.layers,d._cache.layers)].count(False),flush=True)
    del res,res2,m,h
  if "deepseek" in which:
    cfg=CONFIGS["deepseek-v2-lite"]()
    t=time.time(); res=build_model(cfg,dev,dev); print("deepseek resident",time.time()-t, sum(p.numel()*2 for p in res.parameters())/1e9, res.config._experts_implementation, flush=True)
    def host():
        t=time.time(); m=build_model(cfg,"cpu",dev); print("host built",time.time()-t,flush=True); return m
    group=host(); t=time.time(); hg=penstock.offload(group,Prefetch(4,1,2,params=["layers"]),device=dev); print("group offload",time.time()-t,hg.plan.moved_bytes/1e9,flush=True)
    fresh=host(); t=time.time(); hf=FreshOnload(fresh,Prefetch(4,1,2,params=["layers"]),dev); print("fresh",time.time()-t,flush=True)
    for B in (1,2,4,8,16):
        hooks=[]
        for mm in (res,group,fresh):
            for mod in mm.modules(): 
                if type(mod).__name__=="DeepseekV2TopkRouter": mod._forward_hooks.clear()
            spread_routing(mm,B,dev)
        # prompt uses a different number of rows: decode only
        import penstock.bench.decoder as D
        steps={}
        for n,mm in (("resident",res),("group",group),("fresh",fresh)):
            for mod in mm.modules():
                if type(mod).__name__=="DeepseekV2TopkRouter": mod._forward_hooks.clear()
            st=DecodeStep(mm,mm,B,dev); spread_routing(mm,B,dev)
            steps[n]=st
        outs={k:s().clone() for k,s in steps.items()}
        graphs={k:cap(steps[k]) for k in ("resident","group")}
        tm=interleave({"resident":graphs["resident"][0].replay,"group":graphs["group"][0].replay,"group eager":steps["group"],"fresh eager":steps["fresh"],"link":link_copy},3,4,time_cuda)
        lk=(1<<30)/tm["link"].ms/1e6; fl=max(tm["resident"].ms,hg.plan.moved_bytes/lk/1e6)
        print("deepseek group",B,"equal",torch.equal(graphs["group"][1],graphs["resident"][1]),torch.equal(outs["group"],outs["resident"]),torch.equal(outs["fresh"],outs["resident"]),"floor",round(fl,2),{k:round(v.ms,2) for k,v in tm.items()},"ratio",round(tm["group"].ms/fl,4),"older/ours",round(tm["fresh eager"].ms/tm["group"].ms,2),flush=True)
    del group,hg,fresh,hf,steps,graphs; import gc; gc.collect(); torch.cuda.empty_cache()
  if "uva" in which:
    B=1
    m=host(); t=time.time(); hu=penstock.offload(m,UVA(params=["experts"]),device=dev); print("uva experts",time.time()-t,hu.plan.uva_bytes/1e9,flush=True)
    m2=host(); inv=take_inventory(m2); lim=hu.plan.uva_bytes; ch=[]
    for s in inv.storages:
        if s.num_bytes<=lim and s.has_parameter: ch.append(s); lim-=s.num_bytes
    h2=penstock.offload(m2,assemble(inv,[],0,"cpu",uva=ch),device=dev); print("unselected",h2.plan.uva_bytes/1e9,flush=True)
    steps={}
    for n,mm in (("resident",res),("experts",m),("unselected",m2)):
        for mod in mm.modules():
            if type(mod).__name__=="DeepseekV2TopkRouter": mod._forward_hooks.clear()
        st=DecodeStep(mm,mm,B,dev); spread_routing(mm,B,dev); steps[n]=st
    outs={k:s().clone() for k,s in steps.items()}
    graphs={k:cap(s) for k,s in steps.items()}
    gv=device_view(rate,dev).view(64,-1); idx=torch.randperm(64,device=dev)[:32]; gat=lambda: gv[idx]
    tm=interleave({**{k:g[0].replay for k,g in graphs.items()},"eager experts":steps["experts"],"link":link_copy,"gather":gat},3,4,time_cuda)
    gr=(1<<29)/tm["gather"].ms/1e6
    routed=26*6*3*2048*1408*2
    bound=routed/gr/1e6+tm["resident"].ms
    print("uva","equal",[torch.equal(graphs[k][1],graphs["resident"][1]) for k in graphs],[torch.equal(outs[k],outs["resident"]) for k in outs],{k:round(v.ms,2) for k,v in tm.items()},"gather GB/s",round(gr,1),"routed GB",routed/1e9,"bound",round(bound,2),"ratio",round(tm["experts"].ms/bound,4),"selected vs not",round(tm["unselected"].ms/tm["experts"].ms,3),flush=True)
    del m,m2,hu,h2,graphs,steps,res
  if "others" in which:
    cfg=CONFIGS["qwen3-8b"]()
    m=build_model(cfg,"cpu",dev); h=penstock.offload(m,Prefetch(4,1,2,params=["layers"]),device=dev)
    from accelerate import dispatch_model
    am=build_model(cfg,"cpu",dev)
    dm={"model.embed_tokens":0,"model.norm":0,"model.rotary_emb":0,"lm_head":0}
    for i in range(36): dm[f"model.layers.{i}"]="cpu" if i%4==3 else 0
    am=dispatch_model(am,dm,main_device=0)
    allm=build_model(cfg,"cpu",dev); ha=penstock.offload(allm,Prefetch(1,1,2,params=["layers"]),device=dev)
    steps={"penstock group":DecodeStep(m,m,1,dev),"accelerate":DecodeStep(am,am,1,dev),"penstock all":DecodeStep(allm,allm,1,dev)}
    try:
        from diffusers.hooks import apply_group_offloading
        dmod=build_model(cfg,"cpu",dev); t=time.time()
        apply_group_offloading(dmod.model.layers,onload_device=dev,offload_device=torch.device("cpu"),offload_type="leaf_level",use_stream=True)
        print("diffusers pin",time.time()-t)
        for n in ("embed_tokens","norm","rotary_emb"): getattr(dmod.model,n).to(dev)
        dmod.lm_head.to(dev)
        steps["diffusers all"]=DecodeStep(dmod,dmod,1,dev)
    except Exception as e: print("diffusers",repr(e)[:400],flush=True)
    outs={k:s().clone() for k,s in steps.items()}
    tm=interleave({**steps,"link":link_copy},3,3,time_cuda)
    print("others",{k:torch.equal(v,outs["penstock group"]) for k,v in outs.items()},{k:round(v.ms,2) for k,v in tm.items()},flush=True)
